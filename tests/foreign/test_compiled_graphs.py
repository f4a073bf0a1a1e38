"""What Inductor and Dynamo note of a kernel is read; a graph of the CPU is run again by itself."""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from hypocenter.foreign.caller import innermost_line
from hypocenter.foreign.compiled.graphs import CompiledGraphs, GraphInput, UserGraph
from hypocenter.foreign.compiled.kernels import facts_of, name_of, read_wrapper
from hypocenter.foreign.compiled.made_again import made_again
from hypocenter.foreign.compiled.session import CompiledSession

#: As Inductor writes it, of torch 2.13; shortened.
WRAPPER = '''# AOT ID: ['0_forward']
# kernel path: /tmp/torchinductor_ann/zw/czw.py
# Topologically Sorted Source Nodes: [h, getitem], Original ATen: [aten.embedding, aten.index]
# Source node to ATen node mapping:
#   getitem => index
#   h => embedding
# Graph fragment:
#   %primals_3 : Tensor "i64[16][1]cuda:0" = PlaceHolder[target=primals_3]
#   %add : Tensor "i64[32][1]cuda:0" = PlaceHolder[target=add]
#   %primals_2 : Tensor "f32[128, 16][16, 1]cuda:0" = PlaceHolder[target=primals_2]
#   %embedding : Tensor "f32[32, 16][16, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = (%primals_2, %add), kwargs = {})
#   %index : Tensor "f32[16, 16][16, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.index.Tensor](args = (%embedding, [%primals_3]), kwargs = {})
#   return %index
triton_poi_fused_embedding_index_0 = async_compile.triton('triton_poi_fused_embedding_index_0', """
text
""", device_str='cuda')
# Original path: PROGRAM:2
add_bias_0 = async_compile.triton('add_bias', """
text
""", device_str='cuda')

def call(args):
    primals_1, primals_2, primals_3 = args
    triton_poi_fused_embedding_index_0.run(primals_3, buf0, reinterpret_tensor(primals_2, (128, 16), (16, 1), 0), buf1, 256, stream=stream0)
    add_bias_0.run(buf1, primals_1, 7, stream=stream0)
'''  # noqa: E501
PROGRAM = "import triton\n@triton.jit\n# a note\ndef add_bias(x_ptr, y_ptr, n):\n    pass\n"


@pytest.fixture
def wrapper(tmp_path: Path) -> Path:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    file = tmp_path / "cwrapper.py"
    file.write_text(WRAPPER.replace("PROGRAM", str(program)))
    return file


def line_of(file: Path, text: str) -> int:
    lines = file.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def graph_of(tmp_path: Path) -> UserGraph:
    model = tmp_path / "model.py"
    model.write_text("def forward(self, ids, rows):\n    h = self.table(ids)\n    return h[rows]\n")
    inputs = (
        GraphInput("L['ids']", (32,)),
        GraphInput("L['self']._modules['table']._parameters['weight']", (128, 16)),
        GraphInput("L['rows']", (16,)),
    )
    return UserGraph({"h": f"{model}:2", "getitem": f"{model}:3"}, inputs)


def test_a_kernel_is_told_with_lines_of_the_program_and_its_names(
    wrapper: Path, tmp_path: Path
) -> None:
    line = line_of(wrapper, "_index_0.run(")
    parameters = ("in_ptr0", "in_ptr1", "in_ptr2", "out_ptr0", "xnumel")
    facts = facts_of(str(wrapper), line, parameters, graph_of(tmp_path), {}, is_numbered=True)
    assert facts is not None
    assert facts["parameters"] == {
        "in_ptr0": "primals_3", "in_ptr1": "buf0", "in_ptr2": "primals_2", "out_ptr0": "buf1",
    }  # fmt: skip
    assert facts["names"] == {"primals_2": "self.table.weight", "primals_3": "rows"}
    told = [(op.node, op.op, op.operands, op.text) for op in facts["ops"]]
    assert told == [
        ("embedding", "aten.embedding.default", ("primals_2", "add"), "h = self.table(ids)"),
        ("index", "aten.index.Tensor", ("embedding", "primals_3"), "return h[rows]"),
    ]
    assert facts["ops"][1].sites == (f"{tmp_path}/model.py:3",)


def test_a_kernel_of_the_programs_own_is_told_with_its_def(wrapper: Path, tmp_path: Path) -> None:
    line = line_of(wrapper, "add_bias_0.run(")
    facts = facts_of(str(wrapper), line, ("x_ptr", "y_ptr", "n"), None, {}, is_numbered=True)
    assert facts is not None
    assert facts["original"] == f"{tmp_path}/program.py:4"
    assert (facts["ops"], facts["names"]) == ((), {})


def test_what_is_not_sure_has_no_name(wrapper: Path, tmp_path: Path) -> None:
    graph = graph_of(tmp_path)
    assert name_of("primals_3", {"primals_3": "16"}, graph) == "rows"
    assert name_of("arg0_1", {}, graph) == "ids"
    # Another shape is another tensor, whatever its number.
    assert name_of("primals_3", {"primals_3": "17"}, graph) == ""
    assert name_of("primals_3", {"primals_3": "s0"}, graph) == "rows"
    for node in ("primals_4", "primals_0", "buf0", "tangents_1"):
        assert name_of(node, {}, graph) == ""
    assert facts_of(str(wrapper), 1, (), graph, {}, is_numbered=True) is None
    assert read_wrapper(str(tmp_path / "nothing.py")) is None
    line = line_of(wrapper, "_index_0.run(")
    facts = facts_of(str(wrapper), line, ("in_ptr0",), graph, {}, is_numbered=False)
    assert facts is not None
    assert facts["names"] == {}


def test_inputs_have_names_only_where_torch_compiled_the_same_ones(
    wrapper: Path, tmp_path: Path
) -> None:
    session = CompiledSession(lambda: None, lambda do, *args: do(*args))
    graph, backward = graph_of(tmp_path), tmp_path / "cbackward.py"
    backward.write_text(wrapper.read_text().replace("0_forward", "0_backward"))
    assert not session._is_numbered(str(backward), graph)
    assert session._is_numbered(str(wrapper), graph)
    assert session._is_numbered(str(backward), graph)
    # Two that are one memory are one input of what is compiled.
    fewer = UserGraph(graph.sites, graph.inputs[:2])
    assert not session._is_numbered(str(wrapper), fewer)
    assert not session._is_numbered(str(backward), fewer)
    assert not session._is_numbered(str(wrapper), None)


def test_a_node_of_a_backward_half_has_the_line_that_inductor_had(
    wrapper: Path, tmp_path: Path
) -> None:
    """Its name may be that of another node of the program's."""
    backward = tmp_path / "cbackward.py"
    text = wrapper.read_text().replace("0_forward", "0_backward")
    backward.write_text(text.replace("#   h => embedding", "#   embedding => embedding"))
    line = line_of(backward, "_index_0.run(")
    graph = graph_of(tmp_path)
    sites = {**graph.sites, "embedding": graph.sites["getitem"]}
    graph = UserGraph(sites, graph.inputs)
    facts = facts_of(str(backward), line, (), graph, {}, is_numbered=True)
    assert facts is not None
    assert [op.text for op in facts["ops"]] == ["", "return h[rows]"]
    facts = facts_of(
        str(backward), line, (), graph, {"embedding": graph.sites["h"]}, is_numbered=True
    )
    assert facts is not None
    assert [op.text for op in facts["ops"]] == ["h = self.table(ids)", "return h[rows]"]


def node(name: str, op: str = "call_function", **more: Any) -> Any:
    return SimpleNamespace(name=name, op=op, meta={}, stack_trace=None, **more)


def test_a_file_belongs_to_the_graph_that_is_compiled_or_to_its_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = "0/0"
    context = SimpleNamespace(current_compile_id=lambda: current or None)
    guards = SimpleNamespace(CompileContext=context)
    monkeypatch.setitem(sys.modules, "torch._guards", guards)
    source = SimpleNamespace(name=lambda: "L['x']")
    trace = f'  File "{__file__}", line 9, in f\n    x[i]\n  File "<frozen x>", line 1, in g\n'
    model = SimpleNamespace(
        graph=SimpleNamespace(nodes=[node("l_x_", "placeholder", _dynamo_source=source), node("a")])
    )
    model.graph.nodes[1].stack_trace = trace

    class PyCodeCache:
        @classmethod
        def load_by_key_path(cls, key: str, path: str) -> str:
            return path

    def compile_fx(model: Any, *, inner: bool = False) -> str:
        if not inner:  # as it does where it has other settings
            return str(compiler.compile_fx(SimpleNamespace(graph=None), inner=True))
        return PyCodeCache.load_by_key_path("k", "/c/forward.py")

    compiler = SimpleNamespace(compile_fx=compile_fx)
    graphs = CompiledGraphs(lambda do, *args: do(*args))
    graphs.watch_compiler(compiler)
    graphs.watch_files(SimpleNamespace(PyCodeCache=PyCodeCache))
    assert compiler.compile_fx(model) == "/c/forward.py"
    found = graphs.of_file("/c/forward.py")
    assert found is not None
    assert [given.name for given in found.inputs] == ["x"]
    assert found.sites == {"a": f"{__file__}:9"}
    assert found.function == (__file__, "f")
    [code] = [
        one for one in compile("def f(): 0", __file__, "exec").co_consts if hasattr(one, "co_name")
    ]
    assert found.is_of(code)
    assert found.is_of(code.replace(co_name="torch_dynamo_resume_in_f_at_9"))
    assert not found.is_of(code.replace(co_name="g"))
    assert not found.is_of(code.replace(co_filename="other.py"))
    # The backward half is compiled when it first runs, as the same compilation.
    PyCodeCache.load_by_key_path("k", "/c/backward.py")
    assert graphs.of_file("/c/backward.py") is found
    current = "1/0"
    PyCodeCache.load_by_key_path("k", "/c/other.py")
    assert graphs.of_file("/c/other.py") is None
    # Of two graphs of one compilation none is the one.
    current = "0/0"
    compiler.compile_fx(model)
    PyCodeCache.load_by_key_path("k", "/c/third.py")
    assert graphs.of_file("/c/third.py") is None


def test_the_innermost_line_is_the_programs_own() -> None:
    torch = f"{Path(sys.prefix) / 'lib/python3/site-packages/torch/nn/modules/sparse.py'}"
    model = f"{Path(sys.prefix) / 'lib/python3/site-packages/transformers/model.py'}"
    places = [("/home/ann/train.py", 3), (model, 7), (torch, 9)]
    assert innermost_line(places) == "/home/ann/train.py:3"
    assert innermost_line(places[1:]) == f"{model}:7"
    assert innermost_line(places[2:]) == ""


# -- a graph of the CPU ---------------------------------------------------------------------------


def failing(build: Any, given: dict[str, Any], said: str, tmp_path: Path) -> dict[str, Any] | None:
    """What is found of a graph whose compiled form said an error, called with `given`."""
    torch = pytest.importorskip("torch")
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(f"l_{name}_") for name in given}
    result = build(graph, nodes)
    graph.output(result)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    inputs = tuple(GraphInput(f"L['{name}']", tuple(x.shape)) for name, x in given.items())
    function = str(tmp_path / "model.py"), "forward"
    user = UserGraph({result.name: f"{__file__}:1"}, inputs, module, function)
    wrapper = tmp_path / "cwrapper.py"
    wrapper.write_text(
        "def call(f):\n    cpp_fused_index_0(f)\ndef cpp_fused_index_0(f):\n    f()\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(wrapper.read_text(), str(wrapper), "exec"), scope)

    def fail() -> None:
        raise RuntimeError(said)

    program = "def forward(" + ", ".join(given) + "):\n    call(fail)\n"
    own: dict[str, Any] = {"call": scope["call"], "fail": fail}
    exec(compile(program, str(tmp_path / "model.py"), "exec"), own)
    trace: TracebackType | None = None
    try:
        own["forward"](**given)
    except RuntimeError as error:
        trace, raised = error.__traceback__, error
    assert trace is not None
    return made_again(raised, trace, lambda file: user if file == str(wrapper) else None)


@pytest.mark.parametrize("value", [40, -41, -40])
def test_the_operation_that_fails_alone_is_found_with_its_element(
    value: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.arange(12)
    ids[7] = value

    def look_up(graph: Any, nodes: dict[str, Any]) -> Any:
        return graph.call_function(operator.getitem, (nodes["x"], (slice(None), nodes["ids"])))

    given = {"x": torch.zeros(3, 40), "ids": ids}
    said = "kernel, /tmp/c.main.cpp:28, index out of bounds: 0 <= tmp7 < 40L"
    found = failing(look_up, given, said, tmp_path)
    if value == -40:  # counts from the end: nothing fails
        assert found is None
        return
    assert found is not None
    assert (found["index_name"], found["element"], found["value"]) == ("ids", (7,), value)
    assert (found["target_name"], found["dimension"], found["bound"]) == ("x", 1, 40)
    assert (found["num_outside"], found["is_clean_inside"]) == (1, True)
    assert (found["kernel"], found["op"].sites) == ("cpp_fused_index_0", (f"{__file__}:1",))
    assert failing(look_up, given, said.replace("40L", "41L"), tmp_path) is None
    assert failing(look_up, given, "out of memory", tmp_path) is None


def test_operations_with_an_index_along_a_dimension(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    said = "index out of bounds: 0 <= tmp0 < 5L"
    index = torch.tensor([[0], [5]])
    given = {"x": torch.zeros(2, 5), "index": index}

    def gather(graph: Any, nodes: dict[str, Any]) -> Any:
        return graph.call_method("gather", (nodes["x"], -1, nodes["index"]))

    found = failing(gather, given, said, tmp_path)
    assert found is not None
    assert (found["element"], found["value"], found["dimension"]) == ((1, 0), 5, 1)

    def embed(graph: Any, nodes: dict[str, Any]) -> Any:
        function = torch.nn.functional.embedding
        return graph.call_function(function, (nodes["ids"], nodes["weight"]))

    given = {"weight": torch.zeros(5, 3), "ids": torch.tensor([0, 4, -1])}
    found = failing(embed, given, said, tmp_path)
    assert found is not None
    # A negative one is none of an embedding's.
    assert (found["index_name"], found["value"]) == ("ids", -1)
    assert found["target_name"] == "weight"


def test_an_index_that_the_graph_itself_changes_is_not_told(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def step(graph: Any, nodes: dict[str, Any]) -> Any:
        graph.call_method("add_", (nodes["at"], 1))
        return graph.call_function(operator.getitem, (nodes["x"], nodes["at"]))

    given = {"x": torch.zeros(5), "at": torch.tensor([4])}
    said = "index out of bounds: 0 <= tmp0 < 5L"
    assert failing(step, given, said, tmp_path) is None
