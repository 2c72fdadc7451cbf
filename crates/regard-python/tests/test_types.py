"""The stub names what the compiled module has, and every public object has documentation."""

import ast
import inspect
from pathlib import Path

import libraries
import regard
import regard._regard as compiled

STUB = ast.parse((Path(regard.__file__).parent / "_regard.pyi").read_text())


def public(names):
    return {name for name in names if not name.startswith("_")}


def stubs(body):
    return {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def test_names():
    assert (Path(regard.__file__).parent / "py.typed").exists()
    assert public(stubs(STUB.body)) == public(vars(compiled)) - {"annotations"}
    assert public(regard.__all__) <= public(vars(compiled))


def test_members():
    for name, node in stubs(STUB.body).items():
        found = getattr(compiled, name, None)
        if isinstance(node, ast.ClassDef) and found is not None and not issubclass(found, Exception):
            assert public(stubs(node.body)) == public(vars(found)), name


def test_signatures():
    """Arguments in the documentation are those of the stub."""
    functions = {name: node for name, node in stubs(STUB.body).items() if isinstance(node, ast.FunctionDef)}
    functions["Plan"] = stubs(stubs(STUB.body)["Plan"].body)["__new__"]
    for method in ("run", "schedule", "map_mask"):
        functions[f"Plan.{method}"] = stubs(stubs(STUB.body)["Plan"].body)[method]
    for name, node in functions.items():
        found = eval(f"compiled.{name}")  # noqa: S307: names of this file
        documented = [p for p in inspect.signature(found).parameters if p != "self"]
        typed = [argument.arg for argument in node.args.args + node.args.kwonlyargs if argument.arg not in ("self", "cls")]
        assert sorted(documented) == sorted(typed), name


def test_the_operators_of_pytorch_take_what_the_functions_take():
    """All but streams: the operators run on PyTorch's current one. `lse` is another operator's."""
    for name in ("attention", "append", "append_latent", "merge", "copy_blocks"):
        taken = libraries.stub_arguments("_regard.pyi", name) - {"stream"} - ({"lse"} if name == "attention" else set())
        assert libraries.stub_arguments("torch.pyi", name) == taken, name


def test_documentation():
    for name in regard.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(regard, name)), name
