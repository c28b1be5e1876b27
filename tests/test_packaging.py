"""What is published: wheel and sdist hold what they should, and the wheel works where nothing is but what its metadata asks for.

The environment that it is installed into sees of this one's packages those that it depends on, by links, and no other: whatever
else its code would need is missing there, as it is to a user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Iterable, Mapping, Sequence
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.command_line import ROOT
from tests.test_readme import README, blocks_of

PACKAGES = ("sessiontree", "engine_bridge")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = f"sessiontree-{PROJECT['version']}"


def files_of(*places: str) -> dict[str, bytes]:
    """What lies in directories of the repository, or files, by name."""
    found = [path for place in places for path in ((ROOT / place).rglob("*") if (ROOT / place).is_dir() else [ROOT / place])]
    kept = [path for path in found if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in kept}


def run(*command: object, cwd: Path, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=500
    )


def output(done: subprocess.CompletedProcess[str]) -> str:
    """What a program that succeeds prints."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Built(NamedTuple):
    sdist: Path
    wheel: Path
    of_the_sdist: Path  # a wheel, made from what the sdist holds


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """By the tool that `.venv` was made with: nothing is downloaded."""
    place = tmp_path_factory.mktemp("built")
    for what, options in (("tree", ["--wheel"]), ("sdist", [])):  # without options: the sdist, and a wheel from that
        output(run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", place / what, ROOT, cwd=place))
    (wheel,) = (place / "tree").iterdir()
    return Built(place / "sdist" / f"{NAMED}.tar.gz", wheel, place / "sdist" / wheel.name)


def asked_for(wheel: Path) -> list[str]:
    """The requirements in its metadata."""
    with ZipFile(wheel) as files:
        return message_from_bytes(files.read(f"{NAMED}.dist-info/METADATA")).get_all("Requires-Dist", [])


def needed(requirements: Iterable[str], extra: str = "") -> list[metadata.Distribution]:
    """What these come to here, with all that those need in turn."""
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    todo = [(Requirement(each), frozenset((extra,))) for each in requirements]
    while todo:
        each, extras = todo.pop()
        if each.marker is not None and not any(each.marker.evaluate({"extra": name}) for name in extras):
            continue
        key = (each.name, frozenset(each.extras) or frozenset(("",)))
        if key not in found:
            found[key] = metadata.distribution(each.name)
            todo += [(Requirement(below), key[1]) for below in found[key].requires or ()]
    return list(found.values())


def link(distributions: Iterable[metadata.Distribution], to: Path) -> None:
    """Have these, and nothing else, importable from a directory."""
    to.mkdir(exist_ok=True)
    for distribution in distributions:
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (to / name).exists():
                (to / name).symlink_to(Path(str(distribution.locate_file(name))))


class Installed(NamedTuple):
    """An environment with the wheel and what it depends on; ``wheel``: that."""

    home: Path
    wheel: Path

    def run(self, program: str, *arguments: object, extra: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A program of it, where an extra is installed too. From elsewhere than the repository, which is nowhere to be seen."""
        named = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        if extra:
            beside = self.home.parent / f"with {extra}"
            if not beside.exists():
                link(needed(asked_for(self.wheel), extra), beside)
            named["PYTHONPATH"] = str(beside)
        return run(self.home / "bin" / program, *arguments, cwd=cwd or self.home, environment=named)

    def python(self, code: str, extra: str = "", cwd: Path | None = None) -> str:
        """What code prints."""
        return output(self.run("python", "-c", code, extra=extra, cwd=cwd))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """pip finds every dependency there and looks nowhere else."""
    home = tmp_path_factory.mktemp("installed") / "env"
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    link(needed(asked_for(built.wheel)), packages)
    output(run(sys.executable, "-m", "pip", "--python", home, "install", "--no-index", built.wheel, cwd=home))
    return Installed(home, built.wheel)


# What they hold -------------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_packages_and_nothing_else(built: Built) -> None:
    with ZipFile(built.wheel) as files:
        held = {name: files.read(name) for name in files.namelist()}
    own = {name: data for name, data in held.items() if name.startswith(f"{NAMED}.dist-info/")}
    assert {name: data for name, data in held.items() if name not in own} == files_of(*PACKAGES)
    assert {name.partition("/")[2] for name in own} == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert own[f"{NAMED}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    needed_at_run_time = {"viewer/page.html", "viewer/app.js", "viewer/view.css", "backends/postgres.sql", "py.typed"}
    assert {f"sessiontree/{name}" for name in needed_at_run_time} | {"engine_bridge/py.typed"} <= held.keys()


def test_the_wheel_says_what_the_project_says(built: Built) -> None:
    with ZipFile(built.wheel) as files:
        said = message_from_bytes(files.read(f"{NAMED}.dist-info/METADATA"))
    assert (said["Name"], said["License-Expression"], said["Requires-Python"]) == ("sessiontree", "Apache-2.0", ">=3.11")
    text = said.get_payload(decode=True)
    assert isinstance(text, bytes) and text == README.read_bytes()
    core = [Requirement(each) for each in asked_for(built.wheel)]
    assert {each.name for each in core if "extra" not in str(each.marker)} == {"attrs", "isal", "msgpack", "numpy", "pyrsistent"}
    assert set(said.get_all("Provides-Extra", [])) == PROJECT["optional-dependencies"].keys()


def test_the_sdist_holds_what_the_wheel_is_made_and_tested_from(built: Built) -> None:
    with tarfile.open(built.sdist) as files:
        held = {
            member.name.removeprefix(f"{NAMED}/"): data.read()
            for member in files.getmembers()
            if (data := files.extractfile(member)) is not None
        }
    beside = (
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "SECURITY.md",
        "constraints.txt",
    )
    hidden = (".github", ".gitignore", ".pre-commit-config.yaml")
    expected = files_of(*PACKAGES, "tests", "examples", "benchmarks", "docs", "mkdocs.yml", "pyproject.toml", *beside, *hidden)
    assert held.keys() - expected.keys() == {"PKG-INFO"} and not expected.keys() - held.keys()
    assert [name for name, data in expected.items() if held[name] != data] == []


def test_the_sdist_makes_the_same_wheel(built: Built) -> None:
    assert built.of_the_sdist.read_bytes() == built.wheel.read_bytes()


@pytest.mark.soak
def test_the_sdist_passes_its_own_tests(built: Built, tmp_path: Path) -> None:
    shutil.unpack_archive(built.sdist, tmp_path, filter="data")
    files = ["test_docs_reference", "test_format", "test_project_files", "test_readme", "test_tokens"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(f"tests/{name}.py" for name in files)]
    assert " passed" in output(run(*command, cwd=tmp_path / NAMED, environment={**os.environ, "PYTHONPATH": "."}))


# What works where it is installed ---------------------------------------------------------------------------------------------

IMPORTS = """
import importlib, json, pkgutil, sys
missing = {}
for package in ("sessiontree", "engine_bridge"):
    names = [package]
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            missing[name] = error.name or error.extra
        else:
            assert module.__file__.startswith(sys.prefix)
            below = pkgutil.iter_modules(getattr(module, "__path__", ()), name + ".")
            names += [each.name for each in below if not each.name.endswith("__main__")]
    assert len(names) > 1 or package in missing
print(json.dumps(missing))
"""


def missing_to(installed: Installed, extra: str = "") -> dict[str, str]:
    """Why modules cannot be imported: the package that is not there, or the extra that the error names, by module."""
    found: dict[str, str] = json.loads(installed.python(IMPORTS, extra=extra))
    return found


#: Of what needs an extra: why it cannot be imported without. All else can be imported with the core's dependencies alone.
NEEDS = {
    "cli": ("sessiontree.cli.", "typer"),
    "postgres": ("sessiontree.backends.postgres", "psycopg"),
    "testing": ("sessiontree.testing", "testing"),
    "torch": ("engine_bridge", "torch"),
}


def reasons(missing: Mapping[str, str]) -> set[tuple[str, str]]:
    """Those of ``NEEDS``; a module that is none of them stays itself."""
    known = NEEDS.values()
    return {
        next((need for need in known if name.startswith(need[0]) and why == need[1]), (name, why)) for name, why in missing.items()
    }


def test_every_module_but_those_of_extras_is_importable(installed: Installed) -> None:
    assert reasons(missing_to(installed)) == set(NEEDS.values())


@pytest.mark.parametrize("extra", NEEDS)
def test_an_extra_brings_all_that_its_modules_need(installed: Installed, extra: str) -> None:
    missing = missing_to(installed, extra)
    if extra == "torch":  # its kernels are for CUDA, where torch brings Triton along
        assert missing.pop("engine_bridge.kernels", "triton") == "triton"
    assert reasons(missing) == set(NEEDS.values()) - {NEEDS[extra]}


ROUND_TRIP = """
from sessiontree import MediaItem, NeedsExtra, SessionStore, media_identity
from sessiontree.fsck import fsck
from sessiontree.positions import scheme

rule = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2, image_token_id=9, video_token_id=8)
with SessionStore.open("store", durability="commit") as store:
    session = store.create("demo", scheme=rule)
    image = MediaItem("image", media_identity("png", b"picture"), spans=[(1, 4)], grid_thw=(1, 4, 4))
    question = session.append(session.root, [1, 9, 9, 9, 9, 2], media=[image])
    with session.draft(question) as draft:
        draft.extend([3, 4])
        reply = draft.commit("stop")
    session.set_head("main", reply)
with SessionStore.open("store", read_only=True) as store:
    read = store.get("demo").head("main").node
    assert read.id == reply.id and (read.positions() == reply.positions()).all()
    print(read.input_ids().tolist(), read.next_position)
assert fsck("store").ok
try:
    SessionStore.connect("postgresql://nobody@localhost/nothing")
except NeedsExtra as error:
    print(error)
"""


def test_a_store_is_written_and_read_with_the_core_alone(installed: Installed, tmp_path: Path) -> None:
    printed, refused = installed.python(ROUND_TRIP, cwd=tmp_path).splitlines()
    assert printed == "[1, 9, 9, 9, 9, 2, 3, 4] 6" and "pip install 'sessiontree[postgres]'" in refused


def test_the_code_of_the_readme_runs(installed: Installed, tmp_path: Path) -> None:
    """As it says: with the extra ``torch``."""
    code = "\n".join(block for title, block in blocks_of(README) if not title)
    assert installed.python(code, extra="torch", cwd=tmp_path).split()[:5] == ["tensor([", "2168,", "151644,", "872,", "3170])"]


def test_the_command_says_which_extra_it_needs_and_runs_with_it(installed: Installed, tmp_path: Path) -> None:
    without = installed.run("sessiontree", "--version")
    assert (without.returncode, without.stdout) == (8, "") and "pip install 'sessiontree[cli]'" in without.stderr
    installed.python(ROUND_TRIP, cwd=tmp_path)

    def said(*arguments: str) -> str:
        done = installed.run("sessiontree", *arguments, extra="cli", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert PROJECT["version"] in said("--version")
    assert "demo" in said("ls", "store")
    said("view", "store", "demo", "-o", "page.html")
    assert "<html" in (tmp_path / "page.html").read_text()


def test_nothing_else_is_there(installed: Installed) -> None:
    """Or the tests above would say nothing."""
    (packages,) = installed.home.glob("lib/python*/site-packages")
    names: Sequence[str] = [path.name.partition("-")[0].partition(".")[0] for path in packages.iterdir()]
    assert not set(names) & {"pytest", "rich", "torch", "typer", "typing_extensions"}
    shown = installed.python("import sys; print(*sys.path, sep='\\n')").splitlines()
    assert not [place for place in shown if str(ROOT) in place or (place.endswith("site-packages") and place != str(packages))]
