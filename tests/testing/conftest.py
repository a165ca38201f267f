"""Shows at the end how much the value-comparing runs have moved; reports carry it, also through from workers."""

from typing import Any

MOVED = "moved bytes"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [each for group in ("passed", "failed") for each in terminalreporter.getreports(group)]
    lines = [value for report in reports for key, value in getattr(report, "user_properties", ()) if key == MOVED]
    if lines:
        terminalreporter.section("rules that moved bytes, against the reference loader")
        for line in sorted(lines):
            terminalreporter.write_line(line)
