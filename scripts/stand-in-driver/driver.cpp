// A stand-in for NVIDIA's driver library, for tests of the host's side of regard's CUDA backend where there is no GPU.
//
// Device memory is the host's, streams run everything at once, and a launch computes its kernel's contract one row and
// one key at a time in f64, from the parameters that the real kernel would read. It shows nothing of the kernels, and
// everything that they are given: addresses, strides, lengths, flags, graphs, workspaces. With emulated kernels
// (emulated.h) it runs the kernels instead.
#include "prefill.h"
#include "emulated.h"
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

// A kernel of a module, whose name has the element type.
struct Function {
    std::string entry;
    ElementType type;
    bool by_maps;   // whether it takes tensor maps
    bool has_cache; // whether it reads a cache that is not stored as queries are
    bool has_any;   // whether that is of any format, and keys may be in two tensors
    bool is_latent; // whether it reads one tensor of keys and values, by a tensor map
    bool has_lists; // whether its rows have lists of keys
    bool scales_keys; // whether it takes a scale per key beside elements
    int key_terms;    // heads that add up to one of keys
    Emulated emulated;
};

struct Module {
    ElementType type;
    bool by_maps;
    bool has_cache;
    bool has_any;
    bool is_latent;
    bool has_lists;
    bool scales_keys;
    int key_terms;
    Emulated emulated;
};

// CUDA_MEMCPY2D.
struct Place2D {
    size_t x, y;
    int memory_type;
    const void *host;
    unsigned long long device;
    void *array;
    size_t pitch;
};
struct Copy2D {
    Place2D from, to;
    size_t width, height;
};

// A kernel, or without a function a copy.
struct Launch {
    const Function *function;
    unsigned blocks[2], threads, shared_bytes;
    AttentionParameters attention;
    ListedParameters listed;
    StoredCache cache;
    PrefillParameters prefill;
    WidenParameters widening;
    PrefixParameters prefix;
    TensorMaps maps;
    TensorMap rest_map;
    AppendParameters append;
    MergeParameters merge;
    Copy2D copy;
};

typedef std::vector<Launch> Graph;

void *current_context = nullptr;
Graph *captured = nullptr; // where launches go while a stream is captured

bool is_of_prefix(const std::string &entry) { return entry == "schedule" || entry == "prefix" || entry == "merge_prefix"; }

bool is_of_prefill(const std::string &entry) { return entry == "prefill" || entry == "mask_map" || entry == "combine_splits"; }

bool is_of_widen(const std::string &entry) { return entry == "widen" || entry == "widen_rounded" || entry == "widen_units"; }

bool is_of_decode(const std::string &entry) { return entry == "decode" || entry == "combine" || entry == "schedule_ctas"; }

void run(const Copy2D &copy) {
    for (size_t row = 0; row < copy.height; row++)
        std::memcpy((char *)copy.to.device + row * copy.to.pitch, (const char *)copy.from.device + row * copy.from.pitch, copy.width);
}

void run(const Launch &launch) {
    if (!launch.function) return run(launch.copy);
    const Function &function = *launch.function;
    const long long all = 1ll << 40;
    const std::string &entry = function.entry;
    if (function.emulated && is_of_prefix(entry)) {
        EmulatedLaunch emulated = {&launch.attention};
        emulated.prefix = &launch.prefix;
        emulated.maps = &launch.maps;
        emulated.entry = entry == "schedule" ? EmulatedLaunch::SCHEDULE : entry == "prefix" ? EmulatedLaunch::PREFIX_ITEMS : EmulatedLaunch::MERGE_PREFIX;
        // Work items are taken in turn: fewer blocks take the same.
        emulated.blocks[0] = entry == "prefix" ? 3 : launch.blocks[0];
        emulated.blocks[1] = launch.blocks[1];
        emulated.threads = launch.threads;
        emulated.shared_bytes = launch.shared_bytes;
        emulate(function.emulated, emulated);
        return;
    }
    // There are partial states to combine only if prefill was emulated: else it attended to all keys at once.
    static bool leaves_partials = false;
    if (entry == "prefill") leaves_partials = function.emulated != nullptr;
    if (entry == "combine_splits" && !leaves_partials) return;
    if (function.emulated && (is_of_prefill(entry) || is_of_decode(entry))) {
        EmulatedLaunch emulated = {&launch.attention, &launch.prefill, &launch.maps, &launch.cache, entry == "combine", entry == "schedule_ctas"};
        // Kernels of prefill take tiles from a counter: two blocks (or clusters of them), so that they share it.
        bool fixed = is_of_decode(entry) || entry == "combine_splits";
        emulated.blocks[0] = fixed ? launch.blocks[0] : 2;
        emulated.blocks[1] = fixed ? launch.blocks[1] : 1;
        emulated.threads = launch.threads;
        emulated.shared_bytes = launch.shared_bytes;
        emulated.listed = &launch.listed;
        emulated.rest = &launch.cache.rest;
        emulated.rest_map = &launch.rest_map;
        emulate(function.emulated, emulated);
        return;
    }
    if (function.emulated && (entry == "append" || is_of_widen(entry))) {
        EmulatedLaunch emulated = {&launch.attention};
        emulated.cache = &launch.cache;
        emulated.append = &launch.append;
        emulated.widening = &launch.widening;
        if (entry == "widen_units") emulated.entry = EmulatedLaunch::WIDEN_UNITS;
        if (entry == "widen_rounded") emulated.entry = EmulatedLaunch::WIDEN_ROUNDED;
        emulated.threads = launch.threads;
        emulated.shared_bytes = launch.shared_bytes;
        emulated.blocks[0] = launch.blocks[0];
        emulated.blocks[1] = launch.blocks[1];
        emulate(function.emulated, emulated);
        return;
    }
    // Without emulation `decode` attends to all keys of all sequences, and nothing is left for prefix groups.
    const ListParameters *lists = function.has_lists ? &launch.listed.lists : nullptr;
    if (function.entry == "decode") attend(launch.attention, launch.cache, {}, 0, launch.attention.max_query_len, lists);
    if (function.entry == "prefill") {
        PrefillParameters prefill = launch.prefill;
        // Codes that are read as they are have the same scales in the parameters of their cache.
        if (function.has_cache) prefill.key_scales = prefill.value_scales = {};
        attend(launch.attention, launch.cache, prefill, prefill.min_query_len, all);
    }
    if (function.entry == "widen_units") widen_units(launch.attention, launch.widening, launch.cache);
    if (function.entry == "widen" || function.entry == "widen_rounded") widen(launch.attention, launch.widening, launch.cache);
    if (function.entry == "mask_map") map_tiles(launch.attention, launch.prefill);
    if (function.entry == "append") append(launch.append);
    if (function.entry == "merge") merge(launch.merge);
}

// The beginning of CUlaunchConfig.
struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
};

int submit(const LaunchConfig &config, void *handle, void **arguments) {
    Launch launch = {(const Function *)handle, {config.grid[0], config.grid[1]}, config.block[0], config.shared_bytes};
    const std::string &entry = launch.function->entry;
    if (entry == "append") launch.append = *(const AppendParameters *)arguments[0];
    if (entry == "merge") launch.merge = *(const MergeParameters *)arguments[0];
    if (is_of_decode(entry) || is_of_prefill(entry)) launch.attention = *(const AttentionParameters *)arguments[0];
    if (is_of_prefix(entry)) {
        launch.attention = *(const AttentionParameters *)arguments[0];
        launch.prefix = *(const PrefixParameters *)arguments[1];
        if (entry == "prefix" && launch.function->by_maps) {
            launch.maps.key = *(const TensorMap *)arguments[2];
            launch.maps.value = *(const TensorMap *)arguments[3];
        }
    }
    launch.cache = elements_of(launch.function->type);
    launch.cache.key_terms = launch.function->key_terms;
    if (is_of_widen(entry)) {
        launch.attention = *(const AttentionParameters *)arguments[0];
        launch.widening = *(const WidenParameters *)arguments[1];
        launch.cache = {*(const CacheParameters *)arguments[2]};
    }
    if (entry == "decode" && launch.function->has_cache) launch.cache = {*(const CacheParameters *)arguments[1]};
    if (entry == "decode" && launch.function->has_any) launch.cache.rest = *(const KvTensor *)arguments[2];
    if (is_of_decode(entry) && launch.function->has_lists) launch.listed = *(const ListedParameters *)arguments[0];
    if (entry == "decode" && launch.function->is_latent && launch.function->has_lists) launch.cache.rest = *(const KvTensor *)arguments[1];
    if (entry == "decode" && launch.function->is_latent && !launch.function->has_lists) {
        launch.maps.key = *(const TensorMap *)arguments[1];
        launch.rest_map = *(const TensorMap *)arguments[2];
        launch.cache.rest = tensor_of(launch.rest_map);
        if (!expect_latent(launch.attention, launch.maps.key, launch.rest_map)) return 1;
    }
    if (is_of_prefill(entry)) {
        launch.prefill = *(const PrefillParameters *)arguments[1];
        if (launch.function->has_cache) launch.cache = {*(const CacheParameters *)arguments[launch.function->by_maps ? 3 : 2]};
        bool sound = expect_sound(launch.attention, launch.prefill) && expect_scales(launch.prefill, launch.cache, launch.function->has_cache);
        sound = sound && expect_key_scales(launch.prefill, launch.function->scales_keys, entry == "prefill");
        if (sound && launch.function->by_maps) {
            launch.maps = *(const TensorMaps *)arguments[2];
            sound = expect_maps(launch.attention, launch.prefill, launch.maps, launch.cache, launch.function->has_any);
        }
        if (!sound) return 1;
    }
    if (captured) {
        captured->push_back(launch);
    } else {
        run(launch);
    }
    return 0;
}

int submit_copy(const Copy2D &copy) {
    Launch launch = {};
    launch.copy = copy;
    if (captured) captured->push_back(launch);
    else run(copy);
    return 0;
}

int handle(void **to) {
    *to = std::malloc(1);
    return 0;
}

// An H200's answers, by the numbers of CUdevice_attribute.
int attribute(int which) {
    switch (which) {
    case 75: return 9;              // compute capability, major
    case 76: return 0;              // and minor
    case 16: return 132;            // multiprocessors
    case 97: return 227 << 10;      // shared memory a block can have
    case 38: return 50 << 20;       // L2 cache
    case 115: return 1;             // memory pools
    default: return 0;
    }
}

const int OUT_OF_MEMORY = 2;
const int INVALID_VALUE = 1, NO_BINARY_FOR_GPU = 209;

} // namespace

#pragma GCC visibility push(default)
extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 12000, 0; }
int cuGetErrorName(int, const char **name) { return *name = "STAND_IN_ERROR", 0; }
int cuGetErrorString(int, const char **text) { return *text = "the stand-in refuses", 0; }

int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int length, int) { return std::strncpy(name, "stand-in", length), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = (size_t)4 << 30, 0; }
int cuDeviceGetAttribute(int *value, int which, int) { return *value = attribute(which), 0; }

int cuDevicePrimaryCtxRetain(void **context, int) { return *context = &current_context, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void *context) { return current_context = context, 0; }
int cuCtxGetCurrent(void **context) { return *context = current_context, 0; }
int cuCtxSynchronize() { return 0; }

int cuStreamCreate(void **stream, unsigned) { return handle(stream); }
int cuStreamDestroy_v2(void *stream) { return std::free(stream), 0; }
int cuStreamSynchronize(void *) { return 0; }
// Handles of streams are even; tests take odd numbers for streams of another context.
int cuStreamGetCtx(void *stream, void **context) {
    return *context = (unsigned long long)stream % 2 ? nullptr : &current_context, 0;
}
int cuThreadExchangeStreamCaptureMode(int *) { return 0; }
int cuStreamWaitEvent(void *, void *, unsigned) { return 0; }
int cuEventCreate(void **event, unsigned) { return handle(event); }
int cuEventDestroy_v2(void *event) { return std::free(event), 0; }
int cuEventRecord(void *, void *) { return 0; }
int cuEventSynchronize(void *) { return 0; }
int cuEventElapsedTime(float *milliseconds, void *, void *) { return *milliseconds = 1.0f, 0; }

// The little that is free keeps tests of very large tensors from trying.
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = (size_t)1 << 30, *total = (size_t)4 << 30, 0; }
int cuMemAllocAsync(unsigned long long *address, size_t bytes, void *) {
    if (bytes == 0) return INVALID_VALUE;
    void *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    *address = (unsigned long long)memory;
    return memory ? 0 : OUT_OF_MEMORY;
}
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) { return cuMemAllocAsync(address, bytes, nullptr); }
int cuMemFree_v2(unsigned long long address) { return std::free((void *)address), 0; }
int cuPointerGetAttribute(void *value, int, unsigned long long) { return *(int *)value = 0, 0; }
int cuMemFreeAsync(unsigned long long address, void *) { return std::free((void *)address), 0; }
int cuMemsetD8Async(unsigned long long to, unsigned char byte, size_t bytes, void *) { return std::memset((void *)to, byte, bytes), 0; }
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *) { return std::memcpy((void *)to, from, bytes), 0; }
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *) { return std::memcpy(to, (void *)from, bytes), 0; }
// Synchronous forms: the C interface's test in Python uses them.
int cuMemsetD8_v2(unsigned long long to, unsigned char byte, size_t bytes) { return cuMemsetD8Async(to, byte, bytes, nullptr); }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) { return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr); }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) { return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr); }
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *) {
    Copy2D copy = {{}, {}, bytes, 1};
    copy.from.device = from, copy.to.device = to;
    return submit_copy(copy);
}
int cuMemcpy2DAsync_v2(const Copy2D *copy, void *) {
    const Place2D &from = copy->from, &to = copy->to;
    const int device = 2;
    const size_t max_pitch = 0x7fffffff;
    if (from.memory_type != device || to.memory_type != device || from.x || from.y || to.x || to.y) return INVALID_VALUE;
    for (const size_t pitch : {from.pitch, to.pitch})
        if (pitch < copy->width || pitch > max_pitch) return INVALID_VALUE;
    return submit_copy(*copy);
}

int cuModuleLoadDataEx(void **module, const void *image, unsigned, void *, void *) {
    // No module may be loaded while a graph is captured.
    if (captured) return INVALID_VALUE;
    // As a driver does that is too old for the image, or whose GPU is another.
    if (std::getenv("STAND_IN_TAKES_PTX_ONLY") && !std::memcmp(image, "\x7f" "ELF", 4)) return NO_BINARY_FOR_GPU;
    std::string name = find_module((const char *)image);
    if (name.empty()) return INVALID_VALUE;
    auto holds = [&](const char *part) { return name.find(part) != std::string::npos; };
    ElementType type = holds("_f16_") ? ElementType::F16 : holds("_bf16_") ? ElementType::BF16 : ElementType::F32;
    bool has_cache = holds("_bytes_") || holds("_q8_0_") || holds("_q4_0_") || holds("_any_") || holds("_mla656_");
    *module = new Module{type, (holds("prefill_") && holds("_sm90")) || holds("_wgmma"), has_cache, holds("_any_"), holds("_latent_"), holds("_lists"), holds("_scaled_"), holds("_terms_") ? 2 : holds("_terms3_") ? 3 : 1,
                         find_emulated(name)};
    return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *entry) {
    const Module &of = *(const Module *)module;
    *function = new Function{entry, of.type, of.by_maps, of.has_cache, of.has_any, of.is_latent, of.has_lists, of.scales_keys, of.key_terms, of.emulated};
    return 0;
}
int cuModuleUnload(void *) { return 0; }
int cuFuncGetAttribute(int *value, int, void *) { return *value = 0, 0; }
int cuFuncSetAttribute(void *, int, int) { return 0; }
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared_bytes, void *, void **arguments, void **) {
    return submit({{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes}, function, arguments);
}
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **) {
    return submit(*(const LaunchConfig *)config, function, arguments);
}

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const unsigned long long *dims, const unsigned long long *strides,
                           const unsigned *box, const unsigned *element_strides, int interleave, int swizzle, int, int) {
    return encode(map, type, rank, (unsigned long long)address, dims, strides, box, element_strides, interleave, swizzle);
}

int cuStreamBeginCapture_v2(void *, int) { return captured = new Graph, 0; }
int cuStreamEndCapture(void *, void **graph) { return *graph = captured, captured = nullptr, 0; }
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long) { return *executable = graph, 0; }
int cuGraphLaunch(void *executable, void *) {
    for (const Launch &launch : *(const Graph *)executable) run(launch);
    return 0;
}
int cuGraphExecDestroy(void *) { return 0; }
int cuGraphDestroy(void *graph) { return delete (Graph *)graph, 0; }

} // extern "C"
