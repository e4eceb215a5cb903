#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: a sha256-checked file of a Hugging Face repository in the host's cache."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hf_verified_blob
short_description: Bring a sha256-checked model file into the Hugging Face cache
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Downloads one file of a Hugging Face repository at one commit into the standard cache of that host, where other
    Hub tools find it, and checks its sha256. The file appears under its final name only after the hash matched.
  - Fetches several ranges at once, hashes while they arrive, and resumes after any interruption, also in a later run.
    Ranges on disk are noted in a file beside the partial file, always after the data has reached the disk.
  - Redirects to the content servers are followed by the module itself. The token goes to the endpoint only, and there
    only over https or to this machine. Signed addresses that end are renewed.
  - A file that was verified is remembered by a marker with its size, modification time and path. While these hold, no
    byte of it is read again.
  - While a download runs, a line about it appears on the controller's screen at least every ten seconds.
  - Needs nothing but Python's standard library on the host. Proxies are taken from the environment of the task
    (C(https_proxy), C(no_proxy)), further certificates from C(SSL_CERT_FILE).
options:
  repo:
    description: The repository, C(org/name), spelled as its folder in the cache shall be.
    type: str
    required: true
  revision:
    description: The commit, 40 lower-case hexadecimal digits. Branches and tags are refused, because they move.
    type: str
    required: true
  file:
    description: The file's path inside the repository.
    type: str
    required: true
  sha256:
    description: What the file must hash to, 64 lower-case hexadecimal digits.
    type: str
    required: true
  size_bytes:
    description:
      - The file's exact size in bytes.
      - When it is not given, the endpoint is asked for it.
    type: int
  cache:
    description:
      - The Hub cache on the host.
      - Defaults to C(HF_HUB_CACHE), else C(HF_HOME) with C(/hub) added, else C(~/.cache/huggingface/hub). Must not
        contain a colon.
    type: path
  endpoint:
    description:
      - Address of the Hub or of a mirror with the same paths.
      - Defaults to C(HF_ENDPOINT), else C(https://huggingface.co).
    type: str
  token:
    description:
      - Token for private or gated repositories. Defaults to C(HF_TOKEN) in the task's environment on the host.
      - Sent to O(endpoint) only, over https or to this machine, and never shown or stored.
    type: str
  state_dir:
    description:
      - Where the markers are kept, in C(verified/).
      - Defaults to C(XDG_STATE_HOME) or C(~/.local/state), with C(/tensorless) added.
    type: path
  connections:
    description: How many ranges are fetched at once.
    type: int
    default: 8
  verify:
    description:
      - V(marker) reads a file that is already in the cache only when no marker vouches for it.
      - V(always) hashes it in any case.
    type: str
    choices: [marker, always]
    default: marker
  repair:
    description:
      - What to do when the cache already holds a file under this name with other bytes.
      - V(false) fails and says which file it is; V(true) removes it and downloads it anew.
    type: bool
    default: false
  download:
    description: Whether a file that is not in the cache is downloaded. With V(false) the run fails where it is missing.
    type: bool
    default: true
  lock_wait:
    description: Seconds to wait for another download of the same file before giving up.
    type: int
    default: 600
  stall_timeout:
    description: Seconds without a single byte after which the download fails. What has come is kept.
    type: int
    default: 120
  min_rate:
    description:
      - Bytes a second. A connection below it for two minutes is opened anew; a whole download below it fails.
      - V(0) turns this off.
    type: int
    default: 65536
  mode:
    description: Permissions of the file, in octal.
    type: str
    default: "0644"
  owner:
    description: User that owns the file and the folders made for it. Defaults to the user that the module runs as.
    type: str
  group:
    description: Group of the file and the folders made for it.
    type: str
  progress_file:
    description:
      - A file that is made for the time of the download and holds the latest figures as one JSON object.
      - Set by the action plugin that shows them; rarely useful otherwise.
    type: path
attributes:
  check_mode:
    support: full
    description: Reports what would be done. Reads no byte of any model and sends no request.
  diff_mode:
    support: full
    description: Lists the steps.
  platform:
    support: full
    platforms: posix
    description: Linux with Python 3.9 or later.
seealso:
  - module: tensorless.fleet.tensorless_recipe
"""

EXAMPLES = r"""
- name: Have the model file
  tensorless.fleet.hf_verified_blob:
    repo: iamMrDuncan/Qwen3.8-27B-PN3-GGUF
    revision: c701b6690ec360b16d40f85df1cb76062e30cd38
    file: Qwen3.8-27B-PN3-P0k19.gguf
    sha256: 15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476
    size_bytes: 12954114496
    cache: /var/lib/tensorless/hub
    state_dir: /var/lib/tensorless/state

- name: Read the whole file again and compare
  tensorless.fleet.hf_verified_blob:
    repo: iamMrDuncan/Qwen3.8-27B-PN3-GGUF
    revision: c701b6690ec360b16d40f85df1cb76062e30cd38
    file: Qwen3.8-27B-PN3-P0k19.gguf
    sha256: 15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476
    size_bytes: 12954114496
    cache: /var/lib/tensorless/hub
    state_dir: /var/lib/tensorless/state
    verify: always
  check_mode: false
"""

RETURN = r"""
path:
  description: The file itself.
  type: str
  returned: always
  sample: /var/lib/tensorless/hub/models--org--name/blobs/15ce2d44
snapshot:
  description: The link under which other Hub tools find it.
  type: str
  returned: always
marker:
  description: The marker that vouches for it.
  type: str
  returned: always
cached:
  description: How the file stood before, V(yes), V(partial) or V(no).
  type: str
  returned: success
verified:
  description: Whether the file's sha256 is known to be right, by its hash or by the marker.
  type: bool
  returned: always
actions:
  description: The steps taken, or in check mode the steps to take, in order.
  type: list
  elements: str
  returned: success
bytes_fetched:
  description: Bytes that came over the network in this run.
  type: int
  returned: always
bytes_resumed:
  description: Bytes that an earlier run had left and this one built upon.
  type: int
  returned: always
bytes_hashed:
  description: Bytes read for hashing a file that was already in the cache.
  type: int
  returned: always
seconds:
  description: Time that the module took, in seconds.
  type: float
  returned: always
parts:
  description: Ranges that were fetched.
  type: int
  returned: always
restarts:
  description: How often the server forced the download to begin again.
  type: int
  returned: always
notes:
  description: Observations that do not stop the run, such as a renamed repository.
  type: list
  elements: str
  returned: always
reason:
  description: A fixed word for the kind of failure.
  type: str
  returned: failure
  sample: sha256_mismatch
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_module import ARGUMENTS, run


def main() -> None:
    run(AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True))


if __name__ == "__main__":
    main()
