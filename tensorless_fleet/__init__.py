# SPDX-License-Identifier: Apache-2.0
"""The orchestrator of the Ansible collection ``tensorless.fleet``."""

__version__ = "0.1.0"
