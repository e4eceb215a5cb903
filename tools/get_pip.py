# SPDX-License-Identifier: Apache-2.0
"""Stands in for the pip bootstrap script of `ansible-test` where that cannot be downloaded.

`ansible-test` runs it in an empty virtual environment with the pip version that it wants (`pip==...`). The pip that
comes with Python installs that version from the package index.
"""

import os
import subprocess
import sys

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
ONLY_GET_PIP_KNOWS = ("--no-setuptools", "--no-wheel")

subprocess.check_call([sys.executable, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL)
options = [word for word in sys.argv[1:] if word not in ONLY_GET_PIP_KNOWS]
if os.path.exists(CA_BUNDLE):
    options += ["--cert", CA_BUNDLE]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", "-q", *options]))
