# SPDX-License-Identifier: Apache-2.0
"""Cards: versions, what a GPU must be to run a recipe, and which one runs it. Knows no card by name.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe_schema import VERSION
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

# The last driver branch that drives a family of cards, by the first number of its compute capability.
LAST_BRANCH: Mapping[str, int] = {"6": 580}

_FAILED = "nvidia-smi failed with "  # how a reason may begin; the documented words begin so as well


def version_key(version: str) -> tuple[int, ...]:
    """A dotted version for ordering: parts are numbers, missing parts are 0. Raises ValueError for anything else."""
    if not re.fullmatch(VERSION, version):
        raise ValueError(f"not a dotted version: {version!r}")
    parts = [int(part) for part in version.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def compare_versions(left: str, right: str) -> int:
    """-1, 0 or 1: a total order on dotted versions."""
    a, b = version_key(left), version_key(right)
    return (a > b) - (a < b)


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi lists it; None is what could not be read."""

    index: int
    uuid: Optional[str] = None
    name: str = "unknown GPU"
    compute_capability: Optional[str] = None
    memory_mib: Optional[int] = None
    driver: Optional[str] = None

    def describe(self) -> str:
        memory = "unknown" if self.memory_mib is None else f"{self.memory_mib} MiB"
        compute, driver = self.compute_capability or "unknown", self.driver or "unknown"
        return f"GPU {self.index} ({self.name}, compute {compute}, {memory}, driver {driver})"


@dataclass(frozen=True)
class Gpus:
    """What could be learnt of a host's GPUs; `problem` says why nothing could be, else it is None."""

    cards: tuple[Gpu, ...] = ()
    problem: Optional[str] = None


@dataclass(frozen=True)
class Selection:
    """The recipe that runs, and the GPUs for it."""

    recipe: Recipe
    gpu: str  # as documented: all, or an index
    cards: tuple[Gpu, ...] = ()  # what the container gets, the chosen one first; empty when detection was skipped
    chosen: Optional[Gpu] = None
    detection: str = (
        "matched"  # matched | skipped (--card) | unreadable (no GPU could be read) | unmatched (only shown)
    )
    notes: tuple[str, ...] = field(default_factory=tuple)


def from_facts(facts: Optional[Mapping[str, Any]]) -> Gpus:
    """The nvidia_gpu fact (nvidia_gpu_facts) in the planner's own words."""
    if not facts:
        return Gpus(problem="nvidia-smi not found")
    smi = facts.get("nvidia_smi") or {}
    if not smi.get("found", True):
        return Gpus(problem="nvidia-smi not found")
    listed = [card for card in facts.get("cards") or [] if card.get("index") is not None]
    message = str(smi.get("message") or "")
    if not listed and smi.get("rc") not in (None, 0) and not message.startswith("No devices"):
        why = next(iter(facts.get("reasons") or []), message)
        why = why[len(_FAILED) :] if why.startswith(_FAILED) else why
        return Gpus(problem=f"nvidia-smi failed: {why}".rstrip(": "))
    cards = [
        Gpu(
            index=int(card["index"]),
            uuid=card.get("uuid") or None,
            name=str(card.get("name") or "unknown GPU"),
            compute_capability=card.get("compute_capability") or None,
            memory_mib=card.get("memory_mib"),
            driver=card.get("driver_version") or facts.get("driver_version") or None,
        )
        for card in listed
    ]
    return Gpus(tuple(sorted(cards, key=lambda card: card.index)))


def matches(recipe: Recipe, gpu: Gpu) -> bool:
    """Whether a GPU is the recipe's card: the same compute capability and enough memory. Unreadable is no match."""
    card = recipe.data["card"]
    return (
        gpu.compute_capability == card["compute_capability"]
        and gpu.memory_mib is not None
        and gpu.memory_mib >= card["min_memory_mib"]
    )


def needs(recipe: Recipe) -> str:
    """What the recipe's card must be, for a message."""
    card = recipe.data["card"]
    return f"compute capability {card['compute_capability']} and at least {card['min_memory_mib']} MiB"


def driver_range(recipe: Recipe) -> str:
    """Which drivers the recipe's card can run with, for a message."""
    card = recipe.data["card"]
    last = last_branch(card["compute_capability"])
    return f"{card['min_driver']} or newer" + (f", up to the R{last} branch" if last else "")


def last_branch(compute_capability: str) -> Optional[int]:
    """The last driver branch for a compute capability, or None where no end is known."""
    return LAST_BRANCH.get(compute_capability.partition(".")[0])


def driver_problem(recipe: Recipe, driver: Optional[str]) -> Optional[str]:
    """Why this driver cannot run the recipe, or None."""
    card = recipe.data["card"]
    try:
        have = version_key(driver or "")
    except ValueError:
        return (
            f"the NVIDIA driver's version could not be read; the recipe for {recipe.label} needs {driver_range(recipe)}"
        )
    if have < version_key(card["min_driver"]):
        return (
            f"the NVIDIA driver {driver} is older than {card['min_driver']}, which {recipe.label} needs: "
            f"install {driver_range(recipe)}, and reboot"
        )
    last = last_branch(card["compute_capability"])
    if last is not None and have[:1] > (last,):
        return (
            f"the NVIDIA driver {driver} is newer than the R{last} branch, the last one that supports compute "
            f"capability {card['compute_capability']}: install a driver from {card['min_driver']} up to the R{last} "
            "branch, and reboot"
        )
    return None


def fits(recipe: Recipe, gpus: Gpus) -> tuple[str, str]:
    """yes, no or unknown, and why: a matching GPU with a driver in range."""
    if gpus.problem:
        return "unknown", gpus.problem
    matching = [gpu for gpu in gpus.cards if matches(recipe, gpu)]
    if not matching:
        return "no", f"no GPU has {needs(recipe)}"
    problems = [driver_problem(recipe, gpu.driver) for gpu in matching]
    for gpu, problem in zip(matching, problems):
        if problem is None:
            return "yes", f"GPU {gpu.index}: {gpu.name}"
    return "no", str(problems[0])


def find_gpu(gpus: Gpus, wanted: str) -> Gpu:
    """The GPU that an index or a UUID names."""
    for gpu in gpus.cards:
        if wanted in (str(gpu.index), gpu.uuid):
            return gpu
    listed = ", ".join(f"{gpu.index} ({gpu.name}{', ' + gpu.uuid if gpu.uuid else ''})" for gpu in gpus.cards) or "none"
    raise Refusal(f"there is no GPU {wanted}; nvidia-smi lists: {listed}")


def best_recipe(recipes: Sequence[Recipe], gpu: Gpu) -> Optional[Recipe]:
    """The recipe whose card this GPU is; of several, the one that asks for the most memory."""
    matching = [recipe for recipe in recipes if matches(recipe, gpu)]
    return max(matching, key=lambda recipe: (recipe.data["card"]["min_memory_mib"], recipe.card_id), default=None)


def only_recipe(recipes: Sequence[Recipe], reason: str) -> Recipe:
    """The model's only recipe; with several, a person has to say which."""
    if len(recipes) == 1:
        return recipes[0]
    ids = ", ".join(sorted(recipe.card_id for recipe in recipes))
    raise Refusal(f"{reason}, and {recipes[0].repo} has recipes for several cards: say which with --card ({ids})")


def select(recipes: Sequence[Recipe], gpus: Gpus, wanted: Optional[str], check_driver: bool) -> Selection:
    """The recipe and GPUs of a host whose GPUs can be read. wanted: an index, a UUID or None."""
    repo = recipes[0].repo
    if wanted is not None:
        gpu = find_gpu(gpus, wanted)
        recipe = best_recipe(recipes, gpu)
        if recipe is None:
            raise Refusal(
                f"{gpu.describe()} does not fit {repo}: its recipe needs "
                + "; or ".join(f"{needs(each)} ({each.card_id})" for each in recipes)
            )
        selection = Selection(recipe, str(gpu.index), (gpu,), gpu)
    else:
        pairs = [(gpu, found) for gpu in gpus.cards for found in [best_recipe(recipes, gpu)] if found is not None]
        if not pairs:
            listed = "; ".join(gpu.describe() for gpu in gpus.cards) or "none is listed"
            wants = "; or ".join(f"{needs(each)} ({each.card_id})" for each in recipes)
            raise Refusal(f"no recipe for {repo} fits this host's GPUs: {listed}. It needs {wants}")
        gpu, first = pairs[0]
        matching = tuple(each for each in gpus.cards if matches(first, each))
        everyone = len(matching) == len(gpus.cards)
        selection = Selection(first, "all" if everyone else str(gpu.index), matching if everyone else (gpu,), gpu)
    if check_driver and selection.chosen:
        problem = driver_problem(selection.recipe, selection.chosen.driver)
        if problem:
            raise Refusal(problem)
    return selection
