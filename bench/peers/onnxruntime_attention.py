"""ONNX Runtime on the shapes of `regard bench`: its GroupQueryAttention with the key/value cache in place (Attention of opset 23
where nothing is causal and there is more than one query)."""

import numpy
import onnxruntime
from onnx import TensorProto, helper

import common

DTYPES = {"f32": (numpy.float32, TensorProto.FLOAT), "f16": (numpy.float16, TensorProto.FLOAT16)}


def session(options, node, inputs, outputs, domains, version):
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*domain) for domain in domains], ir_version=version)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def grouped(options, kind, heads, kv_heads, dim):
    info = helper.make_tensor_value_info
    names = ["q", "k", "v", "past_k", "past_v", "last", "total"]
    node = helper.make_node(
        "GroupQueryAttention", names, ["out", "new_k", "new_v"], domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads
    )
    row = lambda name, heads: info(name, kind, ["b", "s", heads * dim])
    cache = lambda name, length: info(name, kind, ["b", kv_heads, length, dim])
    inputs = [row("q", heads), row("k", kv_heads), row("v", kv_heads), cache("past_k", "p"), cache("past_v", "p")]
    inputs += [info("last", TensorProto.INT32, ["b"]), info("total", TensorProto.INT32, [])]
    outputs = [row("out", heads), cache("new_k", "t"), cache("new_v", "t")]
    return session(options, node, inputs, outputs, [("", 17), ("com.microsoft", 1)], 9)


def full(options, kind, heads, kv_heads, dim):
    info = helper.make_tensor_value_info
    tensor = lambda name, heads, length: info(name, kind, ["b", heads, length, dim])
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"])
    inputs = [tensor("q", heads, "s"), tensor("k", kv_heads, "t"), tensor("v", kv_heads, "t")]
    return session(options, node, inputs, [tensor("out", heads, "s")], [("", 23)], 10)


def main():
    options = common.arguments(__doc__, "f32,f16")
    random = numpy.random.default_rng(0)
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    results = []
    for name in options.names:
        batch, heads, kv_heads, dim, queries, keys, causal = common.SHAPES[name]
        for dtype in options.dtype:
            element, kind = DTYPES[dtype]
            draw = lambda *shape: random.standard_normal(shape, dtype=numpy.float32).astype(element)
            q, k, v = draw(batch, queries, heads, dim), draw(batch, kv_heads, keys, dim), draw(batch, kv_heads, keys, dim)
            if causal or queries == 1:
                # The cache holds all but the newest tokens; the operator writes those behind them, where they are already.
                run = grouped(options, kind, heads, kv_heads, dim)
                newest = lambda x: numpy.ascontiguousarray(x[:, :, keys - queries :].transpose(0, 2, 1, 3)).reshape(batch, queries, -1)
                same = {"q": value(q.reshape(batch, queries, -1)), "k": value(newest(k)), "v": value(newest(v))}
                same |= {"last": value(numpy.full(batch, keys - 1, numpy.int32)), "total": value(numpy.array(keys, numpy.int32))}
                calls = []
                for _ in range(common.copies(name, dtype)):
                    cache = {"k": value(k.copy()), "v": value(v.copy())}
                    binding = run.io_binding()
                    for operand, held in same.items():
                        binding.bind_ortvalue_input(operand, held)
                    binding.bind_output("out", "cpu")
                    for operand, held in cache.items():
                        binding.bind_ortvalue_input(f"past_{operand}", held)
                        binding.bind_ortvalue_output(f"new_{operand}", held)
                    calls.append(lambda binding=binding: run.run_with_iobinding(binding))
                calls[-1]()
                out = binding.get_outputs()[0].numpy().reshape(batch, queries, heads, dim)
                operator = "GroupQueryAttention"
            else:
                run = full(options, kind, heads, kv_heads, dim)
                operands = {"q": numpy.ascontiguousarray(q.transpose(0, 2, 1, 3)), "k": k, "v": v}
                calls = [lambda: run.run(None, operands)]
                out = calls[0]()[0].transpose(0, 2, 1, 3)
                operator = "Attention"
            error = common.largest_error(name, q, k, v, out)
            timing = common.measure(options, calls)
            results.append(common.record(options, f"ONNX Runtime {onnxruntime.__version__}", name, dtype, timing, error))
            results[-1]["kernel"] = operator
    common.write(options, results)


main()
