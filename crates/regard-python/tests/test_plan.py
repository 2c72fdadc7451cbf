"""Plans, threads, lifetimes and the time that a call takes."""

import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import reference
import regard

HEADS, KV_HEADS, DIM = 4, 2, 64


def test_a_plan_runs_what_is_smaller(library, normal):
    if library.name.startswith("jax"):
        pytest.skip("JAX arrays are immutable")
    largest = normal(3, 4, HEADS, DIM), normal(3, 40, KV_HEADS, DIM), normal(3, 40, KV_HEADS, DIM)
    plan = regard.Plan(*map(library.make, largest), causal=True, softcap=3.0)
    assert plan.device in ("cpu", "cuda:0") and plan.workspace_bytes >= 0
    assert "kernel" in plan.explain() and plan.kernel in plan.explain()
    plan.prepare()
    for batch, rows, keys in ((3, 4, 40), (1, 1, 17), (2, 3, 3)):
        q, k, v = normal(batch, rows, HEADS, DIM), normal(batch, keys, KV_HEADS, DIM), normal(batch, keys, KV_HEADS, DIM)
        out = library.make(np.full(q.shape, np.nan, np.float32))
        plan.run(library.make(q), library.make(k), library.make(v), out)
        library.synchronize()
        reference.agrees(library.read(out), q, k, v, causal=True, softcap=3.0)


def test_a_plan_writes_lse(normal):
    q, k, v = normal(1, 4, HEADS, DIM), normal(1, 9, KV_HEADS, DIM), normal(1, 9, KV_HEADS, DIM)
    plan = regard.Plan(q, k, v, lse=True, layout="bshd")
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], np.float32)
    plan.run(q, k, v, out, lse=lse)
    reference.agrees(out, q, k, v, lse=lse)


def test_layers_share_a_schedule_and_a_tile_map(library, normal):
    """Runs that read what a step has computed once give the bits of plain runs."""
    if library.name.startswith("jax"):
        pytest.skip("JAX arrays are immutable")
    for rows in (1, 70):
        q, k, v = normal(2, rows, HEADS, DIM), normal(2, 600, KV_HEADS, DIM), normal(2, 600, KV_HEADS, DIM)
        mask = np.random.default_rng(rows).random((1, 1, rows, 600)) < 0.5
        mask[..., :300], mask[..., 300:560] = False, True
        arrays, others = [*map(library.make, (q, k, v))], [*map(library.make, (-q, k, v))]
        mask_there = library.make(mask)
        outs = [library.make(np.full(q.shape, np.nan, np.float32)) for _ in range(4)]
        plan = regard.Plan(*arrays, mask=mask_there)
        plan.run(*arrays, outs[0], mask=mask_there)
        plan.schedule(*arrays, outs[1], mask=mask_there)
        plan.map_mask(*arrays, outs[1], mask=mask_there)
        plan.run(*arrays, outs[1], mask=mask_there, scheduled=True)
        # Runs that read nothing of it, of this plan and of others, leave it as it is.
        plan.run(*others, outs[3], mask=mask_there)
        regard.Plan(*others).run(*others, outs[3])
        plan.run(*arrays, outs[2], mask=mask_there, mapped=True)
        plan.run(*arrays, outs[3], mask=mask_there, mapped=True, scheduled=True)
        library.synchronize()
        reference.agrees(library.read(outs[0]), q, k, v, mask=mask)
        for out in outs[1:]:
            assert (library.read(out) == library.read(outs[0])).all()


def test_a_tile_map_belongs_to_a_mask(normal):
    q, k, v = normal(1, 4, HEADS, DIM), normal(1, 600, KV_HEADS, DIM), normal(1, 600, KV_HEADS, DIM)
    mask, out = np.ones((1, 1, 4, 600), bool), np.empty_like(q)
    plan = regard.Plan(q, k, v, mask=mask)
    with pytest.raises(regard.ArgumentError, match="`mapped` is True; allowed: False, before map_mask"):
        plan.run(q, k, v, out, mask=mask, mapped=True)
    plan.map_mask(q, k, v, out, mask=mask)
    plan.run(q, k, v, out, mask=mask, mapped=True)
    with pytest.raises(regard.ArgumentError, match="`mapped` is True, with operands of other shapes"):
        plan.run(q, k, v, out, mask=np.ones((1, HEADS, 4, 600), bool), mapped=True)
    # A plan without a mask needs no map.
    plain = regard.Plan(q, k, v)
    plain.run(q, k, v, out, mapped=True, scheduled=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scheduled'"):
        regard.attention(q, k, v, scheduled=True)


def test_threads_share_a_plan(normal):
    q, k, v = normal(2, 64, HEADS, DIM), normal(2, 64, KV_HEADS, DIM), normal(2, 64, KV_HEADS, DIM)
    plan = regard.Plan(q, k, v, causal=True)
    want = regard.attention(q, k, v, causal=True)
    wrong = []

    def work():
        out = np.empty_like(q)
        for _ in range(50):
            out.fill(np.nan)
            plan.run(q, k, v, out)
            if not (out == want).all():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_gil_is_released(normal):
    """Another thread counts while attention of some 100 ms runs."""
    q, k, v = (normal(1, 4096, 8, 128) for _ in "qkv")
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        start, before = time.perf_counter(), counted[0]
        regard.attention(q, k, v, causal=True, threads=1)
        seconds, during = time.perf_counter() - start, counted[0] - before
    finally:
        stop.set()
        thread.join()
    assert seconds > 0.01 and during >= 3, (seconds, during)


def test_memory_is_held_while_a_run_uses_it(normal):
    """The only references are dropped by another thread while the run goes on: tensors stay until it ends."""
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(normal(1, 2048, 8, 128)) for name in "qkv"}
    want = regard.attention(*tensors.values(), causal=True)
    results = []
    running = threading.Event()

    def run(box):
        running.set()
        results.append(regard.attention(*(box.pop(name) for name in "qkv"), causal=True))

    thread = threading.Thread(target=run, args=(tensors,))
    thread.start()
    running.wait()
    # `set_` takes the storage from a tensor object that others still name.
    for _ in range(20):
        gc.collect()
        torch.full((2048 * 8 * 128,), float("nan"))
    thread.join()
    assert torch.equal(results[0], want)


def test_nothing_is_kept_after_a_call(normal):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(normal(1, 4, 2, 16)) for _ in "qkv")
    storage = q.untyped_storage()
    before = storage._use_count() if hasattr(storage, "_use_count") else None
    for _ in range(10):
        regard.attention(q, k, v)
    if before is not None:
        assert storage._use_count() == before
    alive = weakref.ref(q)
    del q
    gc.collect()
    assert alive() is None

    array = np.ones((1, 4, 2, 16), np.float32)
    count = sys.getrefcount(array)
    for _ in range(10):
        regard.attention(array, array.copy(), array.copy())
    assert sys.getrefcount(array) == count
    with pytest.raises(regard.ArgumentError):
        regard.attention(array, array[..., ::2], array)
    gc.collect()
    assert sys.getrefcount(array) == count


def test_capsules_are_taken_over_once():
    """An exporter's deleter runs once, also where the call is refused."""
    torch = pytest.importorskip("torch")
    alive = []

    class Exporter:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.append(weakref.ref(tensor))

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

    regard.attention(*(Exporter(torch.ones(1, 2, 2, 8)) for _ in "qkv"))
    with pytest.raises(regard.ArgumentError):
        regard.attention(Exporter(torch.ones(1, 2, 2, 8)), Exporter(torch.ones(1, 2, 2, 9)), Exporter(torch.ones(2)))
    gc.collect()
    assert all(tensor() is None for tensor in alive)


def test_importing_regard_imports_no_array_library():
    import subprocess

    loaded = "import sys, regard; print([m for m in ('numpy', 'torch', 'jax', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", loaded]).strip() == b"[]"
