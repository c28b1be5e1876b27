"""Runs of benchmark scripts as values: read from what a script printed or from a log, and kept as the same lines.

A script prints a line of JSON that describes its run and one for each figure (harness.py). Whatever else it prints is a table for
people, but for lines that say "not measured" and why: those are kept as remarks. A line that begins with ``{`` and is none of the
two is refused with its number, so that nothing is lost or half read. What is kept names no machine and no path of one.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import deep_iterable, deep_mapping, instance_of
from harness import Figure

SCRIPTS = Path(__file__).parent
NOT_MEASURED = "not measured"
_names = deep_iterable(instance_of(str), instance_of(tuple))
_texts = deep_mapping(instance_of(str), instance_of(str), instance_of(dict))


class Malformed(ValueError):
    """A line of a log that is not what scripts print."""


@attrs.frozen
class Machine:
    """What it is, by kind."""

    processor: str = attrs.field(validator=instance_of(str))
    cores: int = attrs.field(validator=instance_of(int))
    memory_gib: float = attrs.field(validator=instance_of((int, float)))
    system: str = attrs.field(validator=instance_of(str))
    gpus: tuple[str, ...] = attrs.field(validator=_names)


@attrs.frozen
class Run:
    """A script's figures, all of one process, with where and of what they are.

    ``failure``: the last words of a script that did not end well, else "". ``added``: from the log of another machine.
    """

    script: str = attrs.field(validator=instance_of(str))
    machine: Machine
    versions: dict[str, str] = attrs.field(validator=_texts)
    day: str = attrs.field(validator=instance_of(str))
    seconds: float = attrs.field(validator=instance_of((int, float)))
    remarks: tuple[str, ...] = attrs.field(default=(), validator=_names)
    failure: str = attrs.field(default="", validator=instance_of(str))
    added: bool = attrs.field(default=False, validator=instance_of(bool))
    figures: tuple[Figure, ...] = ()

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if not figure.passes]


def run_of(value: dict[str, Any]) -> Run:
    """From what ``harness.described`` gives, or ``text``. TypeError, KeyError, ValueError: it is something else."""
    machine = Machine(**{**value["machine"], "gpus": tuple(value["machine"]["gpus"])})
    return Run(**{**value, "machine": machine, "remarks": tuple(value.get("remarks", ()))})


def figure_of(value: dict[str, Any]) -> Figure:
    """From what ``harness.report`` prints. TypeError, ValueError: it is something else."""
    given = {name: each for name, each in value.items() if name != "passes"}
    figure = Figure(**given)
    if value.get("passes") is not figure.passes:
        raise ValueError(f"it says passes: {value.get('passes')!r}, which value and bar do not")
    return figure


def parse(log: str, source: str) -> tuple[list[Run], list[str]]:
    """The runs whose lines are in a log, and the remarks behind the last of them.

    A remark is the run's whose line comes next. ``source`` is what an error calls the log. Malformed: a line of JSON that no script
    prints, or a figure before any run.
    """
    runs: list[Run] = []
    remarks: list[str] = []
    for number, line in enumerate(log.splitlines(), 1):
        if not line.startswith("{"):
            if NOT_MEASURED in line:
                remarks.append(line.strip())
            continue
        try:
            value = json.loads(line)
            if "script" in value:
                run = run_of(value)
                runs.append(attrs.evolve(run, remarks=(*run.remarks, *remarks)))
                remarks = []
            elif not runs:
                raise ValueError("a figure before any line that says which script, where and of what")
            else:
                runs[-1] = attrs.evolve(runs[-1], figures=(*runs[-1].figures, figure_of(value)))
        except (ValueError, TypeError, KeyError) as error:
            raise Malformed(f"{source}, line {number}: {error}: {line[:80]}") from error
    return runs, remarks


def text(runs: Iterable[Run]) -> str:
    """What ``parse`` reads as these runs."""
    lines = []
    for run in runs:
        said = attrs.asdict(run)
        del said["figures"]
        lines += [said, *(attrs.asdict(figure) | {"passes": figure.passes} for figure in run.figures)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def merged(runs: list[Run], new: list[Run]) -> list[Run]:
    """New ones in the places of those of the same script, added ones and others apart; behind them where there is none."""
    found = {(run.script, run.added): run for run in runs}
    return list((found | {(run.script, run.added): run for run in new}).values())


def about(script: str) -> tuple[str, str]:
    """What the docstring of a script says that it measures, and what was expected of it; "" where it does not say."""
    path = SCRIPTS / script
    text = (ast.get_docstring(ast.parse(path.read_text())) or "") if path.is_file() else ""
    paragraphs = [" ".join(paragraph.replace("``", "").split()) for paragraph in text.split("\n\n")]
    expected = (re.search(r"Expected before the first run.*", paragraph) for paragraph in paragraphs)
    return paragraphs[0], next((found[0] for found in expected if found), "")


def without_paths(text: str) -> str:
    """Of each absolute path its last part alone."""
    return re.sub(r"(?<![\w.])(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)
