// Modules are known by their images, which are unpacked in the folder REGARD_IMAGES, each under its module's name and its kind; and kernels that run emulated
// (../cuda-emulator) are libraries of the same names in the folder REGARD_EMULATED.
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
#include <utility>
#include <vector>

#include "../cuda-emulator/launch.h"

// 0, or 1 if all threads of a block wait for each other.
typedef int (*Emulated)(const EmulatedLaunch *);

// All of them: modules' names and bytes.
inline std::vector<std::pair<std::string, std::string>> read_images() {
    std::vector<std::pair<std::string, std::string>> images;
    const char *folder = std::getenv("REGARD_IMAGES");
    DIR *entries = folder ? opendir(folder) : nullptr;
    while (const dirent *entry = entries ? readdir(entries) : nullptr) {
        if (entry->d_name[0] == '.') continue;
        std::ifstream file(std::string(folder) + "/" + entry->d_name, std::ios::binary);
        const std::string name = entry->d_name;
        images.push_back({name.substr(0, name.find('.')), std::string(std::istreambuf_iterator<char>(file), {})});
    }
    if (entries) closedir(entries);
    return images;
}

// The name of the module with that image; empty if no such module ships.
inline std::string find_module(const char *image) {
    static const std::vector<std::pair<std::string, std::string>> images = read_images();
    for (const auto &[name, bytes] : images) {
        // One at a time: the end of the image is not known. No image is the beginning of another.
        size_t same = 0;
        while (same < bytes.size() && image[same] == bytes[same]) same++;
        if (same && same == bytes.size()) return name;
    }
    return "";
}

// The library of the module of that name; null if there is none.
inline Emulated find_emulated(const std::string &module) {
    const char *folder = std::getenv("REGARD_EMULATED");
    void *library = folder ? dlopen((std::string(folder) + "/" + module + ".so").c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    return library ? (Emulated)dlsym(library, "run") : nullptr;
}

inline void emulate(Emulated run, EmulatedLaunch launch) {
    static std::mutex one_at_a_time;
    static unsigned seed = 0;
    // Said at the end, so that the driver's own arithmetic is not taken for the kernels'.
    static struct Launches {
        ~Launches() { std::fprintf(stderr, "stand-in: %u launches of emulated kernels\n", seed); }
    } launches;
    std::lock_guard<std::mutex> guard(one_at_a_time);
    // The order of warps differs from launch to launch.
    launch.copies_late = seed % 2;
    launch.seed = seed + 1;
    if (run(&launch)) {
        std::fprintf(stderr, "stand-in: an emulated kernel stands still\n");
        std::abort();
    }
    seed++;
}
