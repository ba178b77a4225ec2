"""The table of trainers is read as it is written, and a trainer works only if its tests pass."""

from pathlib import Path

from benchmarks.commands.correctness.trainers import Row, judged, rows

TEXT = """
# Trainers

| trainer | version | | tests |
|---|---|---|---|
| A | 1.0 | yes, all | `tests/server/test_a.py::test_one`, `clients/c/tests/test_b.py` |
| B | 2.0 | partly: no GPU | `tests/server/test_a.py::test_two` |
| C | 3.0 | yes | `tests/server/test_a.py::test_two` |
| D | | no: in process alone | |
"""
REPORT = """<testsuites><testsuite>
<testcase classname="tests.server.test_a" name="test_one[x]"><properties><property name="steps" value="3"/></properties>
</testcase>
<testcase classname="tests.server.test_a" name="test_one[y]"><properties><property name="steps" value="2"/></properties>
</testcase>
<testcase classname="tests.server.test_a" name="test_two"><failure/></testcase>
<testcase classname="clients.c.tests.test_b" name="test_all"/>
<testcase classname="clients.c.tests.test_b" name="test_gpu"><skipped/></testcase>
</testsuite></testsuites>"""


def test_rows() -> None:
    assert rows(TEXT)[0] == Row("A", "yes, all", ("tests/server/test_a.py::test_one", "clients/c/tests/test_b.py"))
    assert [row.tests for row in rows(TEXT)][1:] == [("tests/server/test_a.py::test_two",)] * 2 + [()]


def test_who_works_passes(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    figures, lines = judged(rows(TEXT), report)
    assert figures == {"trainers": 4, "trainers_working": 1, "steps_failed": 1, "stale_rollouts": 0, "steps": 5}
    assert [line[1] for line in lines] == ["yes", "partly", "yes", "no"]


def test_a_test_that_did_not_run_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("<testsuites/>")
    figures, _ = judged(rows(TEXT), report)
    assert (figures["trainers_working"], figures["steps_failed"]) == (0, 3)
