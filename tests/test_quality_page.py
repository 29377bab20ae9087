"""`benchmarks/quality.py`: the commands of the pages on quality are found, and are ones that there are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
module = runpy.run_path(str(ROOT / "benchmarks/quality.py"))
all_commands, arguments = module["all_commands"], module["arguments"]


def test_every_command_of_the_pages_is_found() -> None:
    found = all_commands(ROOT / "docs")
    assert any(c.startswith("qbe eval --policies") for c in found)
    assert any("--slices 3,1,1,1,2" in c for c in found), "of a page behind docs/quality.md"
    assert len(found) == len(set(found)) >= 30
    for command in found:
        assert "[" not in command, "a command that can be run as it stands"
        run = arguments(command, Path("/the/data"), Path("/the/zoo"))
        assert run[0] == sys.executable
        assert not {"DIR", "ZOO"} & set(run)
        assert any(a.split("/")[:3] == ["", "the", "data"] for a in run) == ("DIR" in command)
        if command.startswith("python"):
            assert Path(run[1]).is_file()
        else:
            assert run[1:3] == ["-m", "qbe"]
            assert run[3] in ("eval", "quantize", "train")


def test_what_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/quality.md").write_text(
        "text\n\n    python once.py DIR\n    python fails.py\n    python once.py ZOO/a\n\n    other\n"
    )
    (tmp_path / "once.py").write_text("import sys\nprint(sys.argv[1])\nopen('ran', 'a').write('x')\n")
    (tmp_path / "fails.py").write_text("print('half')\nraise SystemExit(3)\n")
    main = module["main"]
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["quality.py", "--data", "/d", "--zoo", "/z", "--out", str(tmp_path / "out")])
    for _ in range(2):
        with pytest.raises(SystemExit, match="these failed: 1"):
            main()
    assert (tmp_path / "out/ran").read_text() == "xx"
    assert (tmp_path / "out/0.txt").read_text().endswith("/d\n")
    assert (tmp_path / "out/2.txt").read_text().endswith("/z/a\n")
    assert not (tmp_path / "out/1.txt").exists()
