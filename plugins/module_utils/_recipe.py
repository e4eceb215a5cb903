# SPDX-License-Identifier: Apache-2.0
"""Recipes: validation, loading a directory of them, and finding the one that a MODEL argument means.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _recipe_schema as schema
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

MAX_BYTES = 1 << 20  # a recipe is a page of text; a larger file is not one
_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def fold(repo: str) -> str:
    """A repository id for comparison without case. ASCII only: ids hold nothing else, and 'K' has a look-alike."""
    return repo.translate(_LOWER)


@dataclass(frozen=True)
class Recipe:
    """A validated recipe: one model on one card. `data` is the file as it stands; never a template."""

    data: Mapping[str, Any]
    path: str = ""

    @property
    def repo(self) -> str:
        return str(self.data["model"]["hf_repo"])

    @property
    def card_id(self) -> str:
        return str(self.data["card"]["id"])

    @property
    def name(self) -> Optional[str]:
        name: Optional[str] = self.data["model"].get("name")
        return name

    @property
    def status(self) -> str:
        return str(self.data["status"])

    @property
    def unpublished(self) -> list[str]:
        """The fields that still hold a placeholder."""
        model, image = self.data["model"], self.data["engine"]["image"]
        placeholders = {
            "model.revision": set(model["revision"]) == {"0"},
            "model.sha256": set(model["sha256"]) == {"0"},
            "model.size_bytes": model["size_bytes"] == 0,
            "engine.image": set(image.rpartition(":")[2]) == {"0"},
        }
        return [name for name, is_placeholder in placeholders.items() if is_placeholder]

    @property
    def label(self) -> str:
        """How messages name a recipe."""
        return f"{self.repo} on {self.card_id}"

    @property
    def status_words(self) -> str:
        return self.status + (", unpublished" if self.unpublished else "")


@dataclass
class Catalog:
    """All recipes of one directory, each valid, found by repository (without case) or short name."""

    recipes: list[Recipe] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    source: str = ""
    by_repo: dict[str, list[Recipe]] = field(default_factory=dict)
    by_name: dict[str, str] = field(default_factory=dict)

    def known(self) -> str:
        """The models there are, for a message."""
        names = {recipe.repo: recipe.name for recipe in self.recipes}
        return ", ".join(repo + (f" ({name})" if name else "") for repo, name in sorted(names.items())) or "none"


def validate(data: Any, path: str = "") -> list[str]:
    """Every problem of one recipe; an empty list means that it is valid. path: <org>/<repo>/<card>.toml."""
    if not isinstance(data, dict):
        return [f"a recipe is a table, not {schema.kind_of(data)}"]
    number = data.get("schema")
    if "schema" in data and (number != schema.SCHEMA or not isinstance(number, int) or isinstance(number, bool)):
        # Another schema has other keys: naming problems by the rules of this one would only mislead.
        return [
            f"schema must be the integer {schema.SCHEMA}, not {schema.shown(number)}: "
            "this recipe is for another version; update tensorless"
        ]
    problems: list[str] = []
    unknown: list[str] = []
    _check_table("", schema.TOP, data, problems)
    unknown += sorted(set(data) - {key.name for key in schema.TOP} - set(schema.TABLES))
    for name, keys in schema.TABLES.items():
        if name not in data:
            if name not in schema.OPTIONAL_TABLES:
                wanted = ", ".join(key.name for key in keys if key.required)
                problems.append(f"[{name}] is required, with {wanted}")
        elif not isinstance(data[name], dict):
            problems.append(f"{name} must be a table, not {schema.kind_of(data[name])}")
        else:
            _check_table(name + ".", keys, data[name], problems)
            unknown += [f"{name}.{key}" for key in sorted(set(data[name]) - {key.name for key in keys})]
    if unknown:
        shown = ", ".join(key if re.fullmatch(r"[\w.-]+", key) else schema.shown(key) for key in unknown)
        problems.insert(0, f"unknown keys: {shown}")
    if path:
        problems += _check_path(data, path)
    return problems


def _check_table(prefix: str, keys: Iterable[schema.Key], table: Mapping[str, Any], problems: list[str]) -> None:
    for key in keys:
        name = prefix + key.name
        if key.name not in table:
            if key.required:
                problems.append(f"{name} is required")
            continue
        value = table[key.name]
        if not isinstance(value, key.kind) or (key.kind is int and isinstance(value, bool)):
            problems.append(f"{name} must be {key.kind_name}, not {schema.kind_of(value)}")
        elif key.rule:
            problem = key.rule(value)
            if problem:
                problems.append(f"{name} {problem}")


def _check_path(data: Mapping[str, Any], path: str) -> list[str]:
    """A recipe sits where its own values say."""
    directory, _slash, file = path.rpartition("/")
    stem = file[: -len(".toml")]
    problems = []
    for table, key, expected, what in (("model", "hf_repo", directory, "directory"), ("card", "id", stem, "file name")):
        values = data.get(table)
        value = values.get(key) if isinstance(values, dict) else None
        if isinstance(value, str) and value != expected:
            problems.append(f"{table}.{key} {schema.shown(value)} does not match the {what} {schema.shown(expected)}")
    return problems


def build_catalog(files: Iterable[tuple[str, Any, list[str]]], source: str = "", shown_prefix: str = "") -> Catalog:
    """A catalogue from (path, data, problems met while reading); refuses with every problem of every file."""
    catalog = Catalog(source=source)
    report: list[tuple[str, list[str]]] = []
    for path, data, read_problems in sorted(files, key=lambda item: item[0]):
        problems = read_problems or validate(data, path)
        if not problems:
            recipe = Recipe(data, shown_prefix + path)
            problems = _add(catalog, recipe)
        if problems:
            report.append((shown_prefix + path, problems))
    if report:
        blocks = [
            f"{path}: invalid recipe:" + "".join(f"\n  - {problem}" for problem in problems)
            for path, problems in report
        ]
        raise Refusal("\n".join(blocks))
    return catalog


def _add(catalog: Catalog, recipe: Recipe) -> list[str]:
    problems = []
    same = catalog.by_repo.setdefault(fold(recipe.repo), [])
    if same and same[0].repo != recipe.repo:
        problems.append(f'model.hf_repo "{recipe.repo}" differs from "{same[0].repo}" ({same[0].path}) only in case')
    if recipe.name is not None:
        # A short name cannot equal a repository: it has no slash.
        owner = catalog.by_name.setdefault(recipe.name, recipe.repo)
        if owner != recipe.repo:
            problems.append(f'model.name "{recipe.name}" is already the short name of {owner}')
    same.append(recipe)
    catalog.recipes.append(recipe)
    return problems


def load_directory(directory: str, shown_prefix: Optional[str] = None) -> Catalog:
    """The catalogue of DIR/<org>/<repo>/<card>.toml. Needs Python 3.11: recipes are read on the controller only.

    Hidden files and directories and files that are no recipes are ignored; a .toml at another depth is, with a warning.
    """
    if not os.path.isdir(directory):
        raise Refusal(f'there is no recipes directory "{directory}"', rc=2)
    parse = _toml_parser()
    found: list[tuple[str, Any, list[str]]] = []
    warnings: list[str] = []
    for path in _toml_files(directory):
        if path.count("/") == 2 and path.endswith(".toml"):
            data, problems = _read(os.path.join(directory, path), parse)
            found.append((path, data, problems))
        else:
            warnings.append(f"{path} is ignored: recipes are <org>/<repo>/<card>.toml below {directory}")
    prefix = directory.rstrip("/") + "/" if shown_prefix is None else shown_prefix
    # The built-in recipes need no address; a directory of the user's own is named in messages.
    catalog = build_catalog(found, directory if shown_prefix is None else "", prefix)
    catalog.warnings = warnings
    return catalog


def _toml_files(directory: str) -> list[str]:
    paths = []
    for root, folders, files in os.walk(directory, followlinks=True):
        below = os.path.relpath(root, directory).replace(os.sep, "/")
        prefix = "" if below == "." else below + "/"
        # Links may lead anywhere, so the walk ends a little below the depth at which recipes sit.
        deep = prefix.count("/") > 2
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        paths += [
            prefix + name for name in sorted(files) if not name.startswith(".") and name.lower().endswith(".toml")
        ]
    return paths


def _toml_parser() -> Callable[[str], dict[str, Any]]:
    try:
        import tomllib
    except ImportError as error:
        raise Refusal(
            "recipes are TOML, which this Python cannot read: run the controller with Python 3.11 or later"
        ) from error
    return tomllib.loads


def _read(path: str, parse: Callable[[str], dict[str, Any]]) -> tuple[Any, list[str]]:
    try:
        with open(path, "rb") as handle:
            raw = handle.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            return None, [f"is larger than {MAX_BYTES} bytes, so it is no recipe"]
        # A byte order mark is invisible in editors and TOML does not allow it: drop it.
        return parse(raw.decode("utf-8-sig")), []
    except OSError as error:
        return None, [f"cannot be read: {error.strerror}"]
    except (ValueError, RecursionError) as error:
        return None, [f"is not valid TOML: {schema.shown(str(error))[1:-1]}"]


def resolve(catalog: Catalog, model: Optional[str]) -> tuple[list[Recipe], Optional[str]]:
    """The recipes that a MODEL argument means (one for each card) and the revision after @, if any."""
    if not isinstance(model, str) or not model:
        raise Refusal("a MODEL is needed: a Hugging Face repository (org/name) or a short name", rc=2)
    name, at, revision = model.partition("@")
    if at and not re.fullmatch(schema.COMMIT, revision):
        raise Refusal(
            f"revision {schema.shown(revision)} is not a commit: after @ a MODEL takes 40 lower-case hex characters, "
            "not a branch, a tag or a short commit",
            rc=2,
        )
    recipes = catalog.by_repo.get(fold(catalog.by_name.get(name, name)), [])
    if not recipes:
        where = f" in {catalog.source}" if catalog.source else ""
        raise Refusal(
            f"no recipe for {schema.shown(name)}; the models known{where} are: {catalog.known()}. "
            "A model that came later needs a newer version"
        )
    return recipes, revision if at else None


def choose_card(recipes: list[Recipe], card: str) -> Recipe:
    """The recipe for one card id."""
    for recipe in recipes:
        if recipe.card_id == card:
            return recipe
    there = ", ".join(sorted(recipe.card_id for recipe in recipes))
    raise Refusal(f'no recipe for "{recipes[0].repo}" on card {schema.shown(card)}; it has recipes for: {there}')
