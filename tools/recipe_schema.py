# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/recipe.schema.json from the definition that validates recipes."""

import json
import pathlib

from ansible_collections.tensorless.fleet.plugins.module_utils._recipe_schema import json_schema

TARGET = pathlib.Path(__file__).resolve().parents[1] / "docs/reference/recipe.schema.json"


def text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
