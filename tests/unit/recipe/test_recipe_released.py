# SPDX-License-Identifier: Apache-2.0
"""The two released recipes, complete and right."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Catalog, load_directory, resolve

from tests.conformance.frame import ROOT

FIXTURES = ROOT.parent / "shared/conformance/fixtures"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_directory(str(ROOT / "recipes"), "recipes/")


def test_there_are_two(catalog: Catalog) -> None:
    assert catalog.known() == (
        "iamMrDuncan/Qwen3.8-27B-PN3-GGUF (pn3), iamMrDuncan/Qwen3.8-27B-UD-IQ3_XXS-Q3Floor-GGUF (q3floor)"
    )
    assert [recipe.status_words for recipe in catalog.recipes] == ["released", "released"]
    assert catalog.warnings == []


@pytest.mark.parametrize(
    ("name", "sha256", "size", "short"),
    [
        ("pn3", "15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476", 12954114496, 30.06),
        ("q3floor", "4b4d6a39dca07c915472b3fdf70267385f6e6f3f38befd5223c9a1ac272cecd0", 11758422944, 26.26),
    ],
)
def test_what_was_measured(catalog: Catalog, name: str, sha256: str, size: int, short: float) -> None:
    data = resolve(catalog, name)[0][0].data
    assert (data["model"]["sha256"], data["model"]["size_bytes"]) == (sha256, size)
    assert data["receipt"]["decode_tps"] == {"short": short}
    assert len(data["run"]["env"]) == 21
    assert data["run"]["args"][-1] == "--jinja"
    assert data["run"]["alias"] == data["model"]["hf_repo"]
    assert data["model"]["title"]
    notes = " ".join(data["receipt"]["notes"])
    for fact in ("429 prompt tokens", "0.1.0-rc1", "2026-11-02", "MiB idle", "Not measured"):
        assert fact in notes
    assert data["receipt"]["source"]


def test_both_share_card_engine_and_settings(catalog: Catalog) -> None:
    first, second = (recipe.data for recipe in catalog.recipes)
    assert first["card"] == second["card"]
    assert first["engine"] == second["engine"]
    assert {**first["run"], "alias": ""} == {**second["run"], "alias": ""}


@pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"the documented recipes are not at {FIXTURES}")
@pytest.mark.parametrize("name", ["pn3", "q3floor"])
def test_they_hold_all_that_the_documentation_gives(catalog: Catalog, name: str) -> None:
    documented: dict[str, Any] = yaml.safe_load((FIXTURES / f"{name}.yml").read_text(encoding="utf-8"))
    ours = resolve(catalog, name)[0][0].data
    for table, values in documented.items():
        if isinstance(values, dict):
            assert {key: ours[table].get(key) for key in values} == values
        else:
            assert ours[table] == values
