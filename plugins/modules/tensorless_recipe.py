#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: tensorless_recipe
short_description: Plan how a model runs on a host, from its recipe
version_added: 0.1.0
author:
  - "tensorless.fleet authors (@tensorless)"
description:
  - Finds the recipe of a model for a card of the host, checks it, and returns the plan, which is everything that would
    run there. The other modules and roles of this collection take the plan as it is.
  - Recipes are read on the controller, from the directory O(recipes_dir). All recipes there are validated, and every
    problem of every file is reported in one message. Their text stays data and is never a template.
  - Nothing on the host is changed, started or downloaded.
notes:
  - The controller needs Python 3.11 or later, which can read TOML. Managed hosts need Python 3.9 or later.
  - A recipe that is a draft, or not published yet, is refused, and so is a host without a fitting card or with a driver
    outside the range that the card supports. The message says what was found, what is needed and what to do.
  - In check mode, a driver or a container runtime that is only not installed yet is no refusal; a note says so.
options:
  model:
    description:
      - The Hugging Face repository, C(org/name), in any case; or the short name of a recipe.
      - C(@) and a commit of 40 hex characters asks for another commit of the repository, which needs O(allow_draft).
      - Without it, the recipes are only checked and listed in RV(recipes), and the host is left alone.
    type: str
  recipes_dir:
    description:
      - A directory on the controller that holds C(<org>/<repo>/<card>.toml). It replaces the collection's own recipes.
      - A relative path starts where C(ansible-playbook) was started. An empty string stands for the collection's own
        recipes.
    type: str
    default: ""
  recipes:
    description:
      - Recipes as data instead of a directory. Filled in from O(recipes_dir); leave it out.
    type: list
    elements: dict
    suboptions:
      path:
        description: Where the recipe comes from, C(<org>/<repo>/<card>.toml) below the recipes directory.
        type: str
        required: true
      data:
        description: The recipe.
        type: dict
        required: true
  card:
    description:
      - Take the recipe for this card id, such as V(p100), without looking at the host's GPUs.
      - Nothing about the GPU is checked then, and the container gets all of them unless O(gpu) names one.
    type: str
  gpu:
    description:
      - The GPU, by its index in C(nvidia-smi) or by its UUID. The container gets only that one.
      - V(each) plans one server for each GPU that fits, on ports counted up from O(port).
      - Without it, the first GPU that fits is taken. Where all GPUs of the host fit, a recipe without C(-sm none) gets
        all of them.
    type: str
  runtime:
    description: The container runtime. V(auto) takes podman where it is installed, else docker.
    type: str
    choices: [auto, podman, docker]
    default: auto
  cache:
    description:
      - The Hugging Face cache directory on the host. Must not contain C(:).
      - Default is E(HF_HUB_CACHE), else C(hub) below E(HF_HOME), else C(~/.cache/huggingface/hub), all of the host.
    type: path
  host:
    description: The address of the host on which the server is published.
    type: str
    default: 127.0.0.1
  port:
    description: The port of the host on which the server is published, 1 to 65535.
    type: int
    default: 8080
  context:
    description: The context length. Another one than the recipe's makes the run untuned.
    type: int
  extra_args:
    description:
      - Arguments for llama-server after those of the recipe. They make the run untuned.
      - Refused are the flags that the plan sets itself (model, address, context, alias, threads), and C(--api-key) and
        C(--hf-token), which would show a secret; use O(api_key_file) for the key.
      - Also refused are options that move layers of a PN file off the card, unless the image's label says that its CPU
        path for such files is exact.
    type: list
    elements: str
    default: []
  api_key_file:
    description:
      - A file on the host that holds the server's API keys, one a line. It is mounted read-only into the container.
      - Makes the run untuned. A changed file gives another plan hash.
    type: path
  hardening:
    description: Limits on the container. Each one is a difference from the documented command.
    type: dict
    default: {}
    suboptions:
      no_new_privileges:
        description: Whether to run with C(no-new-privileges).
        type: bool
      read_only:
        description: Whether the container's root file system is read-only.
        type: bool
      drop_capabilities:
        description: Whether to drop all capabilities.
        type: bool
      memory:
        description: The most memory, such as V(20g).
        type: str
      pids_limit:
        description: The most processes and threads.
        type: int
  allow_draft:
    description: Whether a draft recipe, or another commit than the recipe's, may be used. Its receipt does not apply.
    type: bool
    default: false
  endpoint:
    description: The Hugging Face Hub from which the model would be downloaded.
    type: str
    default: https://huggingface.co
  gpu_facts:
    description:
      - The host's GPUs as M(tensorless.fleet.nvidia_gpu_facts) returns them.
      - Default is the fact C(ansible_facts.nvidia_gpu), and where that was not gathered, the GPUs are read.
    type: dict
  host_models:
    description:
      - All models that this host is to run, each written as in O(model). One that is there more than once gets a
        container name that ends in the first eight hex digits of its card's UUID.
    type: list
    elements: str
    default: []
  show:
    description:
      - Whether the plan is only to be looked at. Drafts, unpublished recipes and hosts without a fitting card are
        then shown and not refused.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Runs the same in check mode; it changes nothing in either.
  diff_mode:
    support: none
    description: There is no change to show.
  platform:
    support: full
    platforms: linux
    description: Runs on Linux.
seealso:
  - module: tensorless.fleet.nvidia_gpu_facts
  - module: tensorless.fleet.tensorless_image
  - module: tensorless.fleet.tensorless_server
  - module: tensorless.fleet.hf_verified_blob
"""

EXAMPLES = r"""
# From the plan to a running server: four tasks, of which the last needs root (become: true on the play).
- name: Plan a model for the first card that fits
  tensorless.fleet.tensorless_recipe:
    model: iamMrDuncan/Qwen3.8-27B-PN3-GGUF
    cache: /var/lib/tensorless/hub
  register: planned

- name: Show what would run
  ansible.builtin.debug:
    msg: "{{ planned.info_text.splitlines() }}"

- name: Have the engine image that was planned
  tensorless.fleet.tensorless_image:
    image: "{{ planned.plan.image }}"
    runtime: "{{ planned.plan.runtime }}"

- name: Bring the model that was planned
  tensorless.fleet.hf_verified_blob:
    repo: "{{ planned.plan.download.repo }}"
    revision: "{{ planned.plan.download.revision }}"
    file: "{{ planned.plan.download.file }}"
    sha256: "{{ planned.plan.download.sha256 }}"
    size_bytes: "{{ planned.plan.download.size_bytes }}"
    cache: "{{ planned.plan.download.cache }}"
    endpoint: "{{ planned.plan.download.endpoint }}"

- name: Start the server that was planned
  tensorless.fleet.tensorless_server:
    plans: "{{ planned.plans }}"
    state: started

- name: Look at a recipe on a machine without a GPU
  tensorless.fleet.tensorless_recipe:
    model: q3floor
    card: p100
    show: true

- name: Plan a server for each card, on ports 8080, 8081 and so on
  tensorless.fleet.tensorless_recipe:
    model: pn3
    gpu: each
    cache: /var/lib/tensorless/hub

- name: Check every recipe of a directory, and list them
  tensorless.fleet.tensorless_recipe:
    recipes_dir: "{{ playbook_dir }}/recipes"
  delegate_to: localhost
  run_once: true

- name: Plan a draft of one's own with a shorter context
  tensorless.fleet.tensorless_recipe:
    model: pn3
    recipes_dir: "{{ playbook_dir }}/recipes"
    allow_draft: true
    context: 32768
"""

RETURN = r"""
plan:
  description: The plan; with O(gpu=each), the first one.
  returned: with O(model)
  type: dict
  contains:
    model:
      description: The Hugging Face repository, as the recipe writes it.
      type: str
      returned: success
    name:
      description: The short name, or null.
      type: str
      returned: success
    card:
      description: The card id of the recipe.
      type: str
      returned: success
    recipe:
      description: The whole recipe.
      type: dict
      returned: success
    recipe_path:
      description: Where the recipe was read.
      type: str
      returned: success
    status:
      description: C(draft) or C(released).
      type: str
      returned: success
    published:
      description: Whether the recipe has no placeholder values.
      type: bool
      returned: success
    unpublished:
      description: The fields that hold placeholders.
      type: list
      elements: str
      returned: success
    notes:
      description: What else a person should know.
      type: list
      elements: str
      returned: success
    fits:
      description: Whether a GPU of the host fits, C(yes), C(no) or C(unknown).
      type: str
      returned: success
    fits_reason:
      description: Why.
      type: str
      returned: success
    detection:
      description: C(matched), C(skipped) (a card was named), C(unreadable) or C(unmatched).
      type: str
      returned: success
    untuned:
      description: Whether the run differs from the measured configuration.
      type: bool
      returned: success
    untuned_reasons:
      description: What differs.
      type: list
      elements: str
      returned: success
    untuned_label:
      description: The line that says so, or null.
      type: str
      returned: success
    receipt_applies:
      description: Whether the receipt's numbers may be compared with this run. False for untuned runs and drafts.
      type: bool
      returned: success
    receipt_decode_tps:
      description: The receipt's decode speed at short context, in tokens a second, or null.
      type: float
      returned: success
    download:
      description: The model file.
      type: dict
      returned: success
      contains:
        url: {description: "The download address.", type: str, returned: success}
        endpoint: {description: "The Hub.", type: str, returned: success}
        repo: {description: "The repository.", type: str, returned: success}
        revision: {description: "The commit.", type: str, returned: success}
        file: {description: "The path in the repository.", type: str, returned: success}
        sha256: {description: "Its sha256.", type: str, returned: success}
        size_bytes: {description: "Its size in bytes.", type: int, returned: success}
        cache: {description: "The cache directory.", type: str, returned: success}
        blob: {description: "The file in the cache.", type: str, returned: success}
        snapshot: {description: "The link to it.", type: str, returned: success}
        snapshot_link: {description: "What the link holds.", type: str, returned: success}
        cached: {description: "C(yes), C(partial) or C(no).", type: str, returned: success}
    image:
      description: The engine image, by digest.
      type: str
      returned: success
    pull_command:
      description: The command that pulls the engine image.
      type: list
      elements: str
      returned: success
    runtime:
      description: C(podman) or C(docker).
      type: str
      returned: success
    gpu:
      description: The GPU as the documented command has it, C(all) or an index.
      type: str
      returned: success
    cards:
      description: The cards that the container gets, each with C(index), C(uuid) and C(name).
      type: list
      elements: dict
      returned: success
    threads:
      description: CPU threads.
      type: int
      returned: success
    context:
      description: The context length in tokens.
      type: int
      returned: success
    alias:
      description: The served model name.
      type: str
      returned: success
    container_name:
      description: The name of the container.
      type: str
      returned: success
    instance:
      description: The instance of the service; the same as the container's name.
      type: str
      returned: success
    host:
      description: The address that the server is published on.
      type: str
      returned: success
    port:
      description: The port that the server is published on.
      type: int
      returned: success
    endpoint:
      description: Where a client on the host reaches the server.
      type: str
      returned: success
    health_url:
      description: Where the server says whether it is ready.
      type: str
      returned: success
    model_mount:
      description: The model's path inside the container.
      type: str
      returned: success
    api_key_file:
      description: The file of API keys on the host, or null.
      type: str
      returned: success
    differences:
      description: Hardening flags of C(exec).
      type: list
      elements: str
      returned: success
    pn:
      description: Whether the file holds PN weights, C(yes), C(no), or C(unknown) while it is not there.
      type: str
      returned: success
    offload:
      description: Options that move layers off the card.
      type: list
      elements: str
      returned: success
    command:
      description: The documented container command, word by word.
      type: list
      elements: str
      returned: success
    exec:
      description: What the service runs; it differs from C(command) by a closed list.
      type: list
      elements: str
      returned: success
    plan_hash:
      description: A hash (64 hex characters) of all that has an effect on the server.
      type: str
      returned: success
plans:
  description: All plans, each like RV(plan). More than one only with O(gpu=each).
  returned: with O(model)
  type: list
  elements: dict
skipped_cards:
  description: The GPUs of the host that fit no recipe of the model.
  returned: with O(model)
  type: list
  elements: dict
  contains:
    index: {description: "The index in nvidia-smi.", type: int, returned: success}
    uuid: {description: "The UUID.", type: str, returned: success}
    name: {description: "The name.", type: str, returned: success}
    reason: {description: "What the GPU is and what the recipe needs.", type: str, returned: success}
info_text:
  description: The plan as text for people.
  returned: with O(model)
  type: str
recipes:
  description: Every recipe of the directory.
  returned: without O(model)
  type: list
  elements: dict
  contains:
    model: {description: "The repository.", type: str, returned: success}
    name: {description: "The short name, or null.", type: str, returned: success}
    card: {description: "The card id.", type: str, returned: success}
    title: {description: "The title, or null.", type: str, returned: success}
    status: {description: "C(draft) or C(released).", type: str, returned: success}
    published: {description: "Whether there are no placeholders.", type: bool, returned: success}
    release: {description: "The engine release.", type: str, returned: success}
    arch: {description: "The GPU architecture of the image.", type: str, returned: success}
rc:
  description: The launcher's exit status for this failure, C(2) for bad usage, else C(1).
  returned: failure
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_module import (
    ARGUMENT_SPEC,
    in_a_play,
    plan_on_host,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = plan_on_host(
            module.params,
            check_mode=module.check_mode,
            run=lambda command: module.run_command(list(command)),
            find=module.get_bin_path,
        )
    except Refusal as refusal:
        module.fail_json(msg=in_a_play(refusal.message), rc=refusal.rc)
    for plan in result["plans"]:
        for note in plan["notes"]:
            module.warn(f"{plan['model']}: {note}")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
