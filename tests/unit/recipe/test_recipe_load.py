# SPDX-License-Identifier: Apache-2.0
"""A recipes directory: what is read, what is ignored, and one message with every problem."""

from __future__ import annotations

import builtins
import pathlib
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import (
    build_catalog,
    choose_card,
    fold,
    load_directory,
    resolve,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.conformance.frame import to_toml
from tests.unit.recipe.recipe_made import VALID, changed

COMMIT = "f" * 40


def write(directory: pathlib.Path, path: str, data: Any = None) -> None:
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    content = data if isinstance(data, (bytes, str)) else to_toml(data or VALID)
    target.write_bytes(content if isinstance(content, bytes) else content.encode())


def refusal(directory: pathlib.Path) -> str:
    with pytest.raises(Refusal) as error:
        load_directory(str(directory))
    assert error.value.rc == 1
    return error.value.message


def other(repo: str = "Org/Other-GGUF", **values: Any) -> dict[str, Any]:
    return changed(model__hf_repo=repo, **{"model__name": ..., **values})


def test_a_good_directory(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml")
    write(tmp_path, "Org/Tiny-GGUF/x2.toml", changed(card__id="x2"))
    write(tmp_path, "Org/Other-GGUF/x1.toml", other())
    catalog = load_directory(str(tmp_path))
    assert [recipe.label for recipe in catalog.recipes] == [
        "Org/Other-GGUF on x1",
        "Org/Tiny-GGUF on x1",
        "Org/Tiny-GGUF on x2",
    ]
    assert catalog.recipes[0].path == f"{tmp_path}/Org/Other-GGUF/x1.toml"
    assert catalog.recipes[1].data == VALID
    assert catalog.recipes[1].name == "tiny"
    assert catalog.source == str(tmp_path)
    assert catalog.warnings == []
    assert catalog.known() == "Org/Other-GGUF, Org/Tiny-GGUF (tiny)"


def test_the_prefix_of_built_in_recipes(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml")
    catalog = load_directory(str(tmp_path) + "/", "recipes/")
    assert catalog.recipes[0].path == "recipes/Org/Tiny-GGUF/x1.toml"
    assert catalog.source == ""
    assert load_directory(str(tmp_path) + "/").recipes[0].path == f"{tmp_path}/Org/Tiny-GGUF/x1.toml"


def test_hidden_and_other_files_are_ignored(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml")
    for path in (
        "README.md",
        "Org/Tiny-GGUF/NOTES.txt",
        "Org/Tiny-GGUF/.x1.toml",
        ".git/repo/x1.toml",
        "Org/.draft/x1.toml",
        "Org/Tiny-GGUF/.deep/er/x1.toml",
        "Org/Tiny-GGUF/x1.toml.bak",
    ):
        write(tmp_path, path, "no = recipe =")
    catalog = load_directory(str(tmp_path))
    assert len(catalog.recipes) == 1
    assert catalog.warnings == []


def test_toml_files_elsewhere_are_ignored_and_named(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml")
    for path in ("x1.toml", "Org/x1.toml", "Org/Tiny-GGUF/sub/x1.toml", "Org/Tiny-GGUF/X1.TOML"):
        write(tmp_path, path, "no = recipe =")
    catalog = load_directory(str(tmp_path))
    assert len(catalog.recipes) == 1
    assert catalog.warnings == [
        f"{path} is ignored: recipes are <org>/<repo>/<card>.toml below {tmp_path}"
        for path in ("x1.toml", "Org/x1.toml", "Org/Tiny-GGUF/X1.TOML", "Org/Tiny-GGUF/sub/x1.toml")
    ]


def test_links_are_followed_and_loops_end(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "real", "x1.toml")
    (tmp_path / "dir/Org").mkdir(parents=True)
    (tmp_path / "dir/Org/Tiny-GGUF").symlink_to(tmp_path / "real")
    (tmp_path / "dir/loop").symlink_to(tmp_path / "dir")
    catalog = load_directory(str(tmp_path / "dir"))
    assert [recipe.repo for recipe in catalog.recipes] == ["Org/Tiny-GGUF"]
    assert len(catalog.warnings) == 1


def test_every_problem_of_every_file_in_one_message(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml", changed(status="x", run__context=0))
    write(tmp_path, "Org/Bad/x1.toml", "schema = 1\nstatus = \n")
    write(tmp_path, "Org/Empty/x1.toml", "")
    write(tmp_path, "Org/Fine/x1.toml", other("Org/Fine"))
    message = refusal(tmp_path)
    blocks = message.split(f"{tmp_path}/")
    assert [block.split(":")[0] for block in blocks[1:]] == [
        "Org/Bad/x1.toml",
        "Org/Empty/x1.toml",
        "Org/Tiny-GGUF/x1.toml",
    ]
    assert blocks[1].startswith("Org/Bad/x1.toml: invalid recipe:\n  - is not valid TOML: ")
    assert blocks[2].count("\n  - ") == 6
    assert blocks[3] == (
        "Org/Tiny-GGUF/x1.toml: invalid recipe:\n"
        '  - status must be "draft" or "released", not "x"\n  - run.context must be positive, not 0'
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is not valid TOML: 'utf-8' codec"),
        (b"a = " + b"[" * 10000, "is not valid TOML: "),
        (b"a = " + b"9" * 5000, "is not valid TOML: "),
        (b"#" * (2**20 + 1), "is larger than 1048576 bytes, so it is no recipe"),
        (b"a = 1\na = 2\n", "is not valid TOML: "),
    ],
    ids=["not UTF-8", "deep", "huge number", "large", "key twice"],
)
def test_files_that_are_no_toml(tmp_path: pathlib.Path, content: bytes, words: str) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml", content)
    assert f"Org/Tiny-GGUF/x1.toml: invalid recipe:\n  - {words}" in refusal(tmp_path)


def test_the_end_of_the_reason_is_shown(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml", "a = 1\na = 2\n")
    assert refusal(tmp_path).endswith("(at line 2, column 6)")


def test_folders_may_begin_with_any_letter_of_a_repository(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "-Org/_Tiny/x1.toml", other("-Org/_Tiny"))
    assert [recipe.repo for recipe in load_directory(str(tmp_path)).recipes] == ["-Org/_Tiny"]


def test_a_file_of_the_greatest_size_is_read(tmp_path: pathlib.Path) -> None:
    text = to_toml(VALID).encode()
    write(tmp_path, "Org/Tiny-GGUF/x1.toml", text + b"#" * (2**20 - len(text)))
    assert len(load_directory(str(tmp_path)).recipes) == 1


def test_windows_line_ends_and_byte_order_mark(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml", b"\xef\xbb\xbf" + to_toml(VALID).replace("\n", "\r\n").encode())
    assert load_directory(str(tmp_path)).recipes[0].data == VALID


def test_a_file_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "Org/Tiny-GGUF").mkdir(parents=True)
    (tmp_path / "Org/Tiny-GGUF/x1.toml").symlink_to("gone")
    assert refusal(tmp_path).endswith("invalid recipe:\n  - cannot be read: No such file or directory")


def test_no_directory(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Refusal) as error:
        load_directory(str(tmp_path / "none"))
    assert error.value.message == f'there is no recipes directory "{tmp_path}/none"'
    assert error.value.rc == 2


def test_an_older_python_is_told_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tomllib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Refusal) as error:
        load_directory(str(tmp_path))
    assert "Python 3.11" in error.value.message


def test_repositories_that_differ_in_case_only(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "ORG/TINY-GGUF/x1.toml", other("ORG/TINY-GGUF"))
    write(tmp_path, "Org/Tiny-GGUF/x1.toml")
    first = f'"ORG/TINY-GGUF" ({tmp_path}/ORG/TINY-GGUF/x1.toml)'
    assert refusal(tmp_path) == (
        f"{tmp_path}/Org/Tiny-GGUF/x1.toml: invalid recipe:\n"
        f'  - model.hf_repo "Org/Tiny-GGUF" differs from {first} only in case'
    )


def test_every_file_of_the_second_spelling_is_named(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "ORG/TINY-GGUF/x1.toml", other("ORG/TINY-GGUF"))
    for name, card in (("Org/Tiny-GGUF", "x1"), ("Org/Tiny-GGUF", "x2"), ("org/tiny-gguf", "x1")):
        write(tmp_path, f"{name}/{card}.toml", other(name, card__id=card))
    lines = [line for line in refusal(tmp_path).splitlines() if line.startswith("  - ")]
    assert len(lines) == 3
    assert all(f'differs from "ORG/TINY-GGUF" ({tmp_path}/ORG/TINY-GGUF/x1.toml) only' in line for line in lines)


def test_short_names_belong_to_one_model(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Other-GGUF/x1.toml", other(model__name="tiny"))
    write(tmp_path, "Org/Tiny-GGUF/x1.toml")
    assert refusal(tmp_path).endswith('  - model.name "tiny" is already the short name of Org/Other-GGUF')


def test_short_names_are_compared_whatever_the_order_of_the_files(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/A-B/x1.toml", other("Org/A-B", model__name="same"))
    write(tmp_path, "Org/A/x1.toml", other("Org/A", model__name="same"))
    assert refusal(tmp_path).endswith('  - model.name "same" is already the short name of Org/A-B')


def test_cards_of_one_model_may_share_its_name_or_have_their_own(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "Org/Tiny-GGUF/x1.toml")
    write(tmp_path, "Org/Tiny-GGUF/x2.toml", changed(card__id="x2"))
    write(tmp_path, "Org/Tiny-GGUF/x3.toml", changed(card__id="x3", model__name="tiny-x3"))
    catalog = load_directory(str(tmp_path))
    assert [len(resolve(catalog, name)[0]) for name in ("tiny", "tiny-x3", "Org/Tiny-GGUF")] == [3, 3, 3]


def files(*recipes: dict[str, Any]) -> list[tuple[str, Any, list[str]]]:
    return [(f"{data['model']['hf_repo']}/{data['card']['id']}.toml", data, []) for data in recipes]


def test_problems_met_while_reading_come_instead_of_the_rules() -> None:
    with pytest.raises(Refusal) as error:
        build_catalog([("a/b/c.toml", None, ["cannot be read"])], shown_prefix="here/")
    assert error.value.message == "here/a/b/c.toml: invalid recipe:\n  - cannot be read"


@pytest.mark.parametrize("model", ["Org/Tiny-GGUF", "org/tiny-gguf", "ORG/TINY-GGUF", "tiny"])
@pytest.mark.parametrize("revision", [None, COMMIT])
def test_resolve(model: str, revision: str | None) -> None:
    catalog = build_catalog(files(VALID, other()))
    recipes, found = resolve(catalog, model + (f"@{revision}" if revision else ""))
    assert [recipe.repo for recipe in recipes] == ["Org/Tiny-GGUF"]
    assert found == revision


@pytest.mark.parametrize("model", ["Tiny", "TINY", "tin", "tiny ", " tiny", "Org/Tiny", "Org", "/", "Org/Tiny-GGUF/x1"])
def test_no_nearest_match(model: str) -> None:
    with pytest.raises(Refusal) as error:
        resolve(build_catalog(files(VALID, other()), source="dir"), model)
    assert error.value.message == (
        f'no recipe for "{model}"; the models known in dir are: Org/Other-GGUF, Org/Tiny-GGUF (tiny). '
        "A model that came later needs a newer version"
    )
    assert error.value.rc == 1


def test_an_empty_catalogue_says_so() -> None:
    with pytest.raises(Refusal) as error:
        resolve(build_catalog([]), "tiny")
    assert 'no recipe for "tiny"; the models known are: none.' in error.value.message


@pytest.mark.parametrize("model", [None, "", 5])
def test_a_model_is_needed(model: Any) -> None:
    with pytest.raises(Refusal) as error:
        resolve(build_catalog(files(VALID)), model)
    assert error.value.message == "a MODEL is needed: a Hugging Face repository (org/name) or a short name"
    assert error.value.rc == 2


@pytest.mark.parametrize(
    "revision", ["", "main", COMMIT[:12], COMMIT + "0", COMMIT.upper(), "g" * 40, COMMIT + "\n", "@"]
)
def test_a_revision_is_a_whole_commit(revision: str) -> None:
    with pytest.raises(Refusal) as error:
        resolve(build_catalog(files(VALID)), f"tiny@{revision}")
    assert "is not a commit: after @ a MODEL takes 40 lower-case hex characters" in error.value.message
    assert error.value.rc == 2


def test_case_is_folded_for_ascii_only() -> None:
    assert fold("ABC-xyz/\u0130\u212a") == "abc-xyz/\u0130\u212a"
    assert fold("@AZ[`az{") == "@az[`az{"
    with pytest.raises(Refusal):
        resolve(build_catalog(files(other("org/k"))), "org/\u212a")


def test_choose_card() -> None:
    recipes = build_catalog(files(VALID, changed(card__id="a9"))).recipes
    assert choose_card(recipes, "x1").card_id == "x1"
    with pytest.raises(Refusal) as error:
        choose_card(recipes, "X1")
    assert error.value.message == 'no recipe for "Org/Tiny-GGUF" on card "X1"; it has recipes for: a9, x1'


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({}, []),
        ({"model__revision": "0" * 40}, ["model.revision"]),
        ({"model__sha256": "0" * 64}, ["model.sha256"]),
        ({"model__size_bytes": 0}, ["model.size_bytes"]),
        ({"engine__image": "0/a@sha256:" + "0" * 64}, ["engine.image"]),
        ({"model__revision": "0" * 39 + "1"}, []),
        ({"model__size_bytes": 1}, []),
        ({"model__sha256": "0" * 64, "model__revision": "0" * 40}, ["model.revision", "model.sha256"]),
    ],
)
def test_unpublished(values: dict[str, Any], fields: list[str]) -> None:
    recipe = build_catalog(files(changed(**values))).recipes[0]
    assert recipe.unpublished == fields
    assert recipe.status_words == ("released, unpublished" if fields else "released")


def test_text_of_a_recipe_stays_as_it_is() -> None:
    data = changed(model__title="{{ 7 * 7 }}", run__args=["{{ x }}", "{% y %}"], run__env={"A": "{{ z }}"})
    recipe = build_catalog(files(data)).recipes[0]
    assert recipe.data["model"]["title"] == "{{ 7 * 7 }}"
    assert recipe.data["run"]["args"] == ["{{ x }}", "{% y %}"]
