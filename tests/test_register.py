"""Ops made by `register`: who is called on which device, what is withdrawn, and that names lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import qbe.kernels.ops
from qbe.kernels.ops.register import OPS, Op, register

FOLDER = Path(qbe.kernels.ops.__path__[0])
MODULES = sorted(".".join(p.relative_to(FOLDER).with_suffix("").parts) for p in FOLDER.rglob("[a-z]*.py"))
MADE_UP = "qbe_test_scale_rows"


@pytest.fixture(scope="module")
def scale_rows() -> Iterator[Op]:
    """Registered once, as torch knows an op for the whole process; its module is imported at its first call."""
    yield register(
        "test_scale_rows(Tensor x, Tensor precision_words, bool halve=False) -> Tensor",
        cpu=f"{MADE_UP}:scale_rows",
        cuda="no.such.module:scale_rows",
        fake=lambda x, precision_words, halve=False: torch.empty_like(x),
    )
    sys.modules.pop(MADE_UP, None)


def test_an_implementation_is_imported_when_it_is_called(scale_rows: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    x, words = torch.ones(2, 3), torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ModuleNotFoundError, match=MADE_UP):
        torch.ops.qbe.test_scale_rows(x, words)
    module = types.ModuleType(MADE_UP)
    module.scale_rows = lambda x, words, halve=False: x * words[:, None] / (2 if halve else 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MADE_UP, module)
    assert torch.ops.qbe.test_scale_rows(x, words).tolist() == [[4] * 3, [8] * 3]
    assert torch.ops.qbe.test_scale_rows(x, words, True).tolist() == [[2] * 3, [4] * 3]
    torch.library.opcheck(torch.ops.qbe.test_scale_rows.default, (x, words))
    compiled = torch.compile(lambda x: torch.ops.qbe.test_scale_rows(x, words) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == [[5] * 3, [9] * 3]


def test_a_compiled_implementation_may_take_its_place_and_leave_it() -> None:
    op = register("test_replaced(Tensor x) -> Tensor", cpu=lambda x: x + 1, fake=torch.empty_like)
    call, x = torch.ops.qbe.test_replaced, torch.zeros(1)
    assert call(x).item() == 1
    op.withdraw_cpu()
    with pytest.raises(NotImplementedError, match="test_replaced"):
        call(x)
    other = torch.library.Library("qbe", "IMPL")
    other.impl(op.name, lambda x: x + 2, "CPU")
    assert call(x).item() == 2
    other._destroy()
    op.restore_cpu()
    assert call(x).item() == 1


def test_it_knows_its_name_and_arguments() -> None:
    op = register("test_pair(Tensor x, int[] sizes) -> (Tensor, Tensor)", cpu=lambda x, sizes: (x + 1, x + 2))
    assert (op.name, op.arguments) == ("test_pair", "Tensor x, int[] sizes")
    assert OPS["test_pair"] is op
    assert [t.item() for t in torch.ops.qbe.test_pair(torch.zeros(1), [1])] == [1, 2]


@pytest.mark.parametrize("name", ["module.function", ":function", "module:", "module:a.b"])
def test_what_names_no_function_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="module:function"):
        register("test_refused(Tensor x) -> Tensor", cpu=name)
    assert "test_refused" not in OPS


def test_every_implementation_is_there() -> None:
    """Those named by a text are only found when they are first called: that of a GPU, on few machines."""
    for module in MODULES:
        import_module(f"qbe.kernels.ops.{module}")
    import_module("qbe.kvcache.step_op")
    has_triton = importlib.util.find_spec("triton") is not None
    ours = [op for name, op in OPS.items() if not name.startswith("test_")]
    assert len(ours) > 15
    for op in ours:
        assert op.fake is not None or op.name == "keep_linear", op.name
        for implementation in (op.cpu, op.cuda):
            path = "" if implementation is None else getattr(implementation, "__qualname__", "")
            if ":" in path and (has_triton or "triton" not in path):
                module, _, function = path.partition(":")
                assert callable(getattr(import_module(module), function)), path


def test_to_import_an_op_imports_no_kernel() -> None:
    lines = [
        "import sys",
        *(f"import qbe.kernels.ops.{module}" for module in MODULES),
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'triton' or m.startswith('qbe.kernels.triton')))",
    ]
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=200)
    assert found.stdout.strip() == "[]", found.stderr


def test_the_worked_example_of_the_documentation_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of docs/kernels.md becomes, or is added to, the module that its first line names."""
    page = (Path(__file__).parents[1] / "docs/kernels.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```python\n( *# qbe/.*?)^ *```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in map(textwrap.dedent, blocks):
        path = block.split("\n")[0].removeprefix("# ")
        name = path.removesuffix(".py").replace("/", ".")
        namespace: dict[str, object] = {}
        exec(compile(block, path, "exec"), namespace)
        module = sys.modules.get(name) or types.ModuleType(name)
        for key, value in namespace.items():
            monkeypatch.setattr(module, key, value, raising=False)
        monkeypatch.setitem(sys.modules, name, module)
    from qbe.kernels.ops.scale_rows import scale_rows
    from qbe.kernels.reference.scale_rows import scale_rows as reference

    words = torch.tensor([4, 8 << 8 | 6, 16], dtype=torch.int32)
    for rows in (0, 1, 3):
        x = torch.randn(rows, 5)
        assert torch.equal(scale_rows(x, words[:rows]), reference(x, words[:rows]))
    torch.library.opcheck(torch.ops.qbe.scale_rows.default, (torch.randn(3, 5), words))
