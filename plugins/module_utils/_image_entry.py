# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

Between AnsibleModule and the logic of tensorless_image.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _image
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import progress_writer
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import (
    Runtime,
    RuntimeUnavailable,
    choose_runtime,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._server_entry import installed, runner


def say(report: Callable[[dict[str, Any]], None], text: str) -> None:
    report({"stage": "pull", "file": "the engine image", "bytes": 0, "size": 0, "note": text})


def run_module(module: Any) -> None:
    params = module.params
    report, close = progress_writer(params["progress_file"])
    result: dict[str, Any] = {"image": params["image"], "runtime": params["runtime"], "pulled": False, "notes": []}
    try:
        image = _image.check_reference(params["image"])
        result["digest"] = image.rsplit("@", 1)[1]
        result["tag"] = _image.keep_tag(image)
        have = installed(module)
        wanted = params["runtime"]
        if module.check_mode and (not have or (wanted != "auto" and wanted not in have)):
            name = "a container runtime" if wanted == "auto" else wanted
            result["notes"].append(f"the images are known after {name} is installed")
            done = _image.ImageResult()
            if params["state"] == "present":
                done = _image.ImageResult(changed=True, actions=[f"pull {image} and tag it {_image.keep_tag(image)}"])
        else:
            result["runtime"] = choose_runtime(wanted, have)
            run = runner(module)
            runtime = Runtime(result["runtime"], run)
            if params["state"] == "present":
                done = _image.present(
                    image,
                    runtime,
                    run,
                    params["retries"],
                    time.sleep,
                    lambda text: say(report, text),
                    module.check_mode,
                )
            else:
                done = _image.absent(image, runtime, run, module.check_mode)
    except (Refusal, RuntimeUnavailable) as exc:
        module.fail_json(msg=str(exc), rc=getattr(exc, "rc", 1), **result)
        return
    finally:
        close()
    result.update(changed=done.changed, pulled=done.pulled, id=done.id, labels=done.labels, actions=done.actions)
    if module._diff:
        result["diff"] = {"before": "", "after": "".join(f"{line}\n" for line in done.actions)}
    module.exit_json(**result)
