"""Files beside the code say what tools expect of them, and what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from ruamel.yaml import YAML

import sessiontree
from sessiontree.backends.frames import VERSION
from tests.command_line import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def yaml(name: str) -> Any:
    return YAML(typ="safe").load(text(name))


def accepts(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "pattern", "count"),
    [
        ("citation-file-format", "CITATION.cff", 1),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml", 1),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml", 3),
    ],
)
def test_files_for_other_programs_follow_their_schemas(schema: str, pattern: str, count: int) -> None:
    files = [str(path) for path in ROOT.glob(pattern)]
    assert len(files) == count
    accepts("check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def test_they_name_one_version_and_one_licence() -> None:
    citation = yaml("CITATION.cff")
    assert citation["version"] == PROJECT["version"] == sessiontree.__version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0" and "Apache License" in text("LICENSE")


def test_what_git_runs_before_a_commit_is_what_make_check_runs() -> None:
    accepts("pre_commit", "validate-config", ".pre-commit-config.yaml")
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", text("Makefile"), re.MULTILINE)
    directories = re.search(r"^CHECKED := (.*)$", text("Makefile"), re.MULTILINE)
    assert recipe is not None and directories is not None
    checked = re.sub(r"\$\(wildcard (.*?)\)", r"\1", directories[1])
    commands = recipe[1].replace("$(CHECKED)", checked).replace("$(BIN)/", ".venv/bin/").split("\n\t")
    (local,) = yaml(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].replace("--force-exclude", ".") for hook in local["hooks"]]  # git names the files instead
    assert [sorted(each.split()) for each in entries] == [sorted(each.split()) for each in commands]


def test_the_changelog_has_its_form() -> None:
    """That of Keep a Changelog: newest first, each version with its day, changes by their kind."""
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    lines = text("CHANGELOG.md").splitlines()
    assert lines[0] == "# Changelog"
    versions = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert versions[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", version) for version in versions[1:]]
    numbers = [tuple(map(int, each.groups()[:3])) for each in released if each is not None]
    assert len(numbers) == len(released) and numbers == sorted(set(numbers), reverse=True)
    assert {line.removeprefix("### ") for line in lines if line.startswith("### ")} <= kinds


def test_every_version_of_the_format_has_its_golden_stores() -> None:
    """Which are never made anew: each says that it is of its version."""
    kept = sorted((ROOT / "tests" / "golden" / "stores").glob("v*"))
    assert [path.name for path in kept] == [f"v{version}" for version in range(1, VERSION + 1)]
    for version, path in enumerate(kept, 1):
        begins = {file.read_bytes().split()[2] for file in path.glob("*/FORMAT")}
        assert begins == {b"%d" % version}


def test_the_policies_name_the_versions_that_the_project_does() -> None:
    rows = dict(re.findall(r"^\| (.*?) \| (.* \| .*) \|$", text("docs/policies.md"), re.MULTILINE))
    classified = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert rows["Python"] == f"{', '.join(classified)} | {classified[0]}" and PROJECT["requires-python"] == f">={classified[0]}"
    pins = dict(re.findall(r"\b([a-z]+)==(\d+\.\d+[.\d]*)", text("constraints.txt") + text("Makefile")))
    minor = {name: pins[name].rpartition(".")[0] for name in ("torch", "transformers")}
    assert f"| {minor['torch']}, " in rows["PyTorch, for `engine_bridge`"]
    assert f"SGLang {pins['sglang']}, vLLM {pins['vllm']}, transformers {minor['transformers']}:" in rows["engines"]
