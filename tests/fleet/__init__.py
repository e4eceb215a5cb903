# SPDX-License-Identifier: Apache-2.0
"""The test fleet: real hosts with systemd, sshd, podman and docker, on one machine."""
