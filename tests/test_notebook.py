"""The notebook of examples/ runs from its first cell to its last, in a kernel of its own."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "examples" / "first_steps.ipynb"


class Here(KernelManager):
    """A kernel of this interpreter, whatever kernels are installed."""

    @property
    def kernel_spec(self):
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
        )


def run(notebook, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder)}
    client = NotebookClient(notebook, km=Here(), timeout=120, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return notebook


def outputs(cell):
    parts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return "".join("".join(part) for part in parts)


def test_the_notebook(tmp_path):
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) == 10
    assert not any(cell.get("outputs") for cell in notebook.cells), "is kept without outputs"
    code = [cell for cell in run(notebook, tmp_path).cells if cell.cell_type == "code"]
    said = [outputs(cell) for cell in code]
    assert float(said[1].split("output:")[1].split()[0]) < 1e-3 and "Rank1" in said[1]
    assert "0.1" in said[2] and "accuracy" in said[3] and "factorized-fl-alpha" in said[5] and "IFrame" in said[5]


def test_an_error_in_a_cell_is_an_error(tmp_path):
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("nothing.there")])
    with pytest.raises(CellExecutionError, match="nothing"):
        run(bad, tmp_path)
