// Kernels that run emulated (../cuda-emulator): a folder, REGARD_EMULATED, with a module's PTX and a library of the same name beside it.
#pragma once
#include "attention.h"
#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>

// Parameters, blocks (or clusters of them), whether copies arrive late, and a seed for the order of warps; 0, or 1 where all threads of a block wait for each other.
typedef int (*Emulated)(const AttentionParameters *, const PrefillParameters *, const TensorMaps *, unsigned, int, unsigned);

// The library of the module with that PTX; null where there is none.
inline Emulated find_emulated(const char *ptx) {
    const char *folder = std::getenv("REGARD_EMULATED");
    DIR *entries = folder ? opendir(folder) : nullptr;
    if (!entries) return nullptr;
    std::string found;
    while (const dirent *entry = readdir(entries)) {
        std::string path = std::string(folder) + "/" + entry->d_name;
        if (path.size() < 4 || path.compare(path.size() - 4, 4, ".ptx")) continue;
        std::ifstream file(path);
        if (std::string(std::istreambuf_iterator<char>(file), {}) == ptx) found = path.substr(0, path.size() - 4) + ".so";
    }
    closedir(entries);
    void *library = found.empty() ? nullptr : dlopen(found.c_str(), RTLD_NOW | RTLD_LOCAL);
    return library ? (Emulated)dlsym(library, "run") : nullptr;
}

inline void emulate(Emulated run, const AttentionParameters &attention, const PrefillParameters &prefill, const TensorMaps &maps) {
    static std::mutex one_at_a_time;
    static unsigned seed = 0;
    // Said at the end, so that nobody takes the driver's own arithmetic for the kernels'.
    static struct Launches {
        ~Launches() { std::fprintf(stderr, "stand-in: %u launches of emulated kernels\n", seed); }
    } launches;
    std::lock_guard<std::mutex> guard(one_at_a_time);
    // Two blocks (or clusters of them), so that they share the counters; the order of warps differs from launch to launch.
    if (run(&attention, &prefill, &maps, 2, seed % 2, seed + 1)) {
        std::fprintf(stderr, "stand-in: an emulated kernel stands still\n");
        std::abort();
    }
    seed++;
}
