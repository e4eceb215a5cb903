# SPDX-License-Identifier: Apache-2.0
"""Versions, matching, driver range, and which GPU runs a recipe."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import Gpu, Gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.recipe.recipe_made import gpu, gpus, recipe

P40 = {"name": "Tesla P40", "compute_capability": "6.1", "memory_mib": 24576}
SMALL = {"name": "Tesla P100-PCIE-12GB", "memory_mib": 12193}


@pytest.mark.parametrize(
    ("left", "right", "order"),
    [
        ("525.60.13", "525.60.13", 0),
        ("525.9.99", "525.60.13", -1),
        ("535.54.03", "525.60.13", 1),
        ("535", "535.0.0", 0),
        ("535.0.1", "535", 1),
        ("535.054", "535.54", 0),
        ("0", "0.0", 0),
        ("10", "9", 1),
    ],
)
def test_versions(left: str, right: str, order: int) -> None:
    assert cards.compare_versions(left, right) == order
    assert cards.compare_versions(right, left) == -order


@pytest.mark.parametrize("text", ["", ".", "1.", ".1", "1..2", "1.x", "v1", "1 ", "1\n", "-1", "\u0661", "1" * 10])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(ValueError, match="not a dotted version"):
        cards.version_key(text)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, True),
        ({"memory_mib": 16000}, True),
        ({"memory_mib": 15999}, False),
        ({"memory_mib": None}, False),
        ({"compute_capability": "6.1"}, False),
        ({"compute_capability": None}, False),
    ],
)
def test_matching(values: dict[str, Any], match: bool) -> None:
    assert cards.matches(recipe(), gpu(**values)) is match


@pytest.mark.parametrize(
    ("capability", "driver", "problem"),
    [
        ("6.0", "525.60.13", None),
        ("6.0", "580.95.05", None),
        ("6.0", "580", None),
        ("6.0", "525.9.99", "is older than 525.60.13"),
        ("6.0", "470.256.02", "driver 470.256.02 is older than 525.60.13, which Org/Tiny-GGUF on x1 needs: install"),
        ("6.0", "581.0", "the NVIDIA driver 581.0 is newer than the R580 branch"),
        ("6.1", "590.44.01", "install a driver from 525.60.13 up to the R580 branch, and reboot"),
        ("7.0", "590.44.01", None),
        ("16.0", "590.44.01", None),
        ("6.0", None, "the NVIDIA driver's version could not be read"),
        ("6.0", "unknown", "needs 525.60.13 or newer, up to the R580 branch"),
        ("7.0", "", "needs 525.60.13 or newer"),
    ],
)
def test_driver_range(capability: str, driver: str | None, problem: str | None) -> None:
    found = cards.driver_problem(recipe(card__compute_capability=capability), driver)
    assert found is None if problem is None else problem in str(found)


def test_the_range_for_people() -> None:
    assert cards.driver_range(recipe()) == "525.60.13 or newer, up to the R580 branch"
    assert cards.driver_range(recipe(card__compute_capability="7.0")) == "525.60.13 or newer"
    assert cards.needs(recipe()) == "compute capability 6.0 and at least 16000 MiB"


def test_describe() -> None:
    assert gpu(3).describe() == "GPU 3 (Tesla X1, compute 6.0, 16269 MiB, driver 535.183.01)"
    assert Gpu(0).describe() == "GPU 0 (unknown GPU, compute unknown, unknown, driver unknown)"


@pytest.mark.parametrize(
    ("seen", "answer"),
    [
        (Gpus(problem="nvidia-smi not found"), ("unknown", "nvidia-smi not found")),
        (gpus(), ("no", "no GPU has compute capability 6.0 and at least 16000 MiB")),
        (gpus(gpu(0, **P40)), ("no", "no GPU has compute capability 6.0 and at least 16000 MiB")),
        (gpus(gpu(0, **P40), gpu(1)), ("yes", "GPU 1: Tesla X1")),
        (gpus(gpu(0, driver="470.1"), gpu(1)), ("yes", "GPU 1: Tesla X1")),
    ],
)
def test_fits(seen: Gpus, answer: tuple[str, str]) -> None:
    assert cards.fits(recipe(), seen) == answer


def test_fits_says_what_is_wrong_with_the_driver() -> None:
    answer, reason = cards.fits(recipe(), gpus(gpu(driver="470.1"), gpu(1, driver="590.1")))
    assert answer == "no"
    assert "the NVIDIA driver 470.1 is older than 525.60.13" in reason


def select(*listed: Gpu, wanted: str | None = None, check_driver: bool = True, recipes: Any = None) -> cards.Selection:
    return cards.select(recipes or [recipe()], gpus(*listed), wanted, check_driver)


@pytest.mark.parametrize(
    ("listed", "shown", "indices"),
    [
        ([gpu(0)], "all", [0]),
        ([gpu(0), gpu(1)], "all", [0, 1]),
        ([gpu(0), gpu(1, **P40)], "0", [0]),
        ([gpu(0, **P40), gpu(1), gpu(2)], "1", [1]),
        ([gpu(0, **SMALL), gpu(1)], "1", [1]),
    ],
)
def test_the_first_fitting_gpu(listed: list[Gpu], shown: str, indices: list[int]) -> None:
    selection = select(*listed)
    assert selection.gpu == shown
    assert [each.index for each in selection.cards] == indices
    assert selection.chosen == selection.cards[0]
    assert selection.detection == "matched"


def test_none_fits() -> None:
    with pytest.raises(Refusal) as error:
        select(gpu(0, **P40), gpu(1, name="NVIDIA GeForce RTX 3090", compute_capability="8.6", memory_mib=24576))
    assert error.value.message == (
        "no recipe for Org/Tiny-GGUF fits this host's GPUs: "
        "GPU 0 (Tesla P40, compute 6.1, 24576 MiB, driver 535.183.01); "
        "GPU 1 (NVIDIA GeForce RTX 3090, compute 8.6, 24576 MiB, driver 535.183.01). "
        "It needs compute capability 6.0 and at least 16000 MiB (x1)"
    )
    with pytest.raises(Refusal, match=r"GPUs: none is listed\. It needs"):
        select()


@pytest.mark.parametrize("wanted", ["1", gpu(1).uuid])
def test_a_named_gpu(wanted: str) -> None:
    selection = select(gpu(0), gpu(1), wanted=wanted)
    assert (selection.gpu, [each.index for each in selection.cards]) == ("1", [1])


def test_the_only_gpu_named_is_an_index() -> None:
    assert select(gpu(0), wanted="0").gpu == "0"


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(Refusal) as error:
        select(gpu(0), Gpu(1, name="Bare"), wanted="4")
    assert error.value.message == (f"there is no GPU 4; nvidia-smi lists: 0 (Tesla X1, {gpu(0).uuid}), 1 (Bare)")
    with pytest.raises(Refusal, match="there is no GPU 0; nvidia-smi lists: none"):
        select(wanted="0")


def test_a_named_gpu_that_does_not_fit() -> None:
    with pytest.raises(Refusal) as error:
        select(gpu(0), gpu(1, **P40), wanted="1", recipes=[recipe(), recipe(card__id="x2", card__min_memory_mib=8)])
    assert error.value.message == (
        "GPU 1 (Tesla P40, compute 6.1, 24576 MiB, driver 535.183.01) does not fit Org/Tiny-GGUF: its recipe needs "
        "compute capability 6.0 and at least 16000 MiB (x1); or compute capability 6.0 and at least 8 MiB (x2)"
    )


@pytest.mark.parametrize("wanted", [None, "0"])
def test_the_driver_is_checked_unless_nothing_is_started(wanted: str | None) -> None:
    old = gpu(0, driver="470.256.02")
    with pytest.raises(Refusal, match="is older than"):
        select(old, wanted=wanted)
    assert select(old, wanted=wanted, check_driver=False).recipe.card_id == "x1"


def test_the_recipe_whose_card_a_gpu_is() -> None:
    recipes = [recipe(), recipe(card__id="v1", card__compute_capability="7.0", card__min_memory_mib=1)]
    assert select(gpu(0, compute_capability="7.0"), recipes=recipes).recipe.card_id == "v1"
    assert select(gpu(0, compute_capability="7.0"), gpu(1), recipes=recipes).recipe.card_id == "v1"
    assert select(gpu(0, compute_capability="7.0"), gpu(1), recipes=recipes).gpu == "0"
    assert select(gpu(0, compute_capability="7.0"), gpu(1), recipes=recipes, wanted="1").recipe.card_id == "x1"


def test_of_two_fitting_recipes_the_one_that_asks_for_more_memory() -> None:
    recipes = [recipe(card__id="a", card__min_memory_mib=8000), recipe(), recipe(card__id="b", card__min_memory_mib=1)]
    assert cards.best_recipe(recipes, gpu()).card_id == "x1"  # type: ignore[union-attr]
    assert cards.best_recipe(recipes, gpu(memory_mib=8000)).card_id == "a"  # type: ignore[union-attr]
    assert cards.best_recipe(recipes, gpu(**P40)) is None


def test_only_recipe() -> None:
    assert cards.only_recipe([recipe()], "why").card_id == "x1"
    with pytest.raises(Refusal) as error:
        cards.only_recipe([recipe(), recipe(card__id="a1")], "nvidia-smi not found")
    assert error.value.message == (
        "nvidia-smi not found, and Org/Tiny-GGUF has recipes for several cards: say which with --card (a1, x1)"
    )


FACT = {"index": 1, "uuid": "GPU-1", "name": "X", "compute_capability": "6.0", "memory_mib": 5, "driver_version": "1.2"}


def test_facts() -> None:
    facts = {"nvidia_smi": {"found": True, "rc": 0}, "driver_version": "9.9", "cards": [FACT, {"index": 0}]}
    seen = cards.from_facts(facts)
    assert seen.problem is None
    assert seen.cards == (Gpu(0, driver="9.9"), Gpu(1, "GPU-1", "X", "6.0", 5, "1.2"))


def test_a_card_without_an_index_is_left_out() -> None:
    assert cards.from_facts({"nvidia_smi": {"found": True, "rc": 0}, "cards": [{"index": None}]}).cards == ()


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (None, "nvidia-smi not found"),
        ({}, "nvidia-smi not found"),
        ({"nvidia_smi": {"found": False}, "cards": []}, "nvidia-smi not found"),
        ({"nvidia_smi": {"found": True, "rc": 9, "message": "no driver"}}, "nvidia-smi failed: no driver"),
        ({"nvidia_smi": {"found": True, "rc": 9}, "reasons": ["reboot", "x"]}, "nvidia-smi failed: reboot"),
        ({"nvidia_smi": {"found": True, "rc": 1}}, "nvidia-smi failed"),
        ({"nvidia_smi": {"found": True, "rc": 6, "message": "No devices were found"}}, None),
        ({"nvidia_smi": {"found": True, "rc": 0}, "cards": []}, None),
        ({"nvidia_smi": {"found": True, "rc": 1}, "cards": [{"index": 0}]}, None),
        ({"cards": [{"index": 0}]}, None),
    ],
)
def test_why_no_gpu_can_be_read(facts: Any, problem: str | None) -> None:
    assert cards.from_facts(facts).problem == problem
