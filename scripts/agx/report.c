// Compiles the kernels of a SPIR-V module with Mesa's compiler for Apple's GPUs, as Mesa's asahi_clc does, and prints
// what each takes. scripts/agx.sh builds it within Mesa's source tree.
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "asahi/compiler/agx_compile.h"
#include "asahi/compiler/agx_nir.h"
#include "compiler/glsl_types.h"
#include "compiler/spirv/nir_spirv.h"
#include "nir.h"
#include "nir_builder.h"
#include "nir_precompiled.h"
#include "util/u_debug.h"

static const struct spirv_to_nir_options spirv_options = {
    .environment = NIR_SPIRV_OPENCL,
    .shared_addr_format = nir_address_format_62bit_generic,
    .global_addr_format = nir_address_format_62bit_generic,
    .temp_addr_format = nir_address_format_62bit_generic,
    .constant_addr_format = nir_address_format_64bit_global,
    .create_library = true,
};

// The driver's, without unrolling: LLVM has unrolled the loops that the text allows it to, and SPIR-V does not carry
// the pragmas of the others.
static nir_shader_compiler_options options;

static void optimize(nir_shader* nir) {
    bool progress;
    do {
        progress = false;
        NIR_PASS(progress, nir, nir_split_var_copies);
        NIR_PASS(progress, nir, nir_split_struct_vars, nir_var_function_temp);
        NIR_PASS(progress, nir, nir_lower_var_copies);
        NIR_PASS(progress, nir, nir_lower_vars_to_ssa);
        NIR_PASS(progress, nir, nir_copy_prop);
        NIR_PASS(progress, nir, nir_opt_remove_phis);
        NIR_PASS(progress, nir, nir_lower_phis_to_scalar, true);
        NIR_PASS(progress, nir, nir_opt_dce);
        NIR_PASS(progress, nir, nir_opt_dead_cf);
        NIR_PASS(progress, nir, nir_opt_cse);
        NIR_PASS(progress, nir, nir_opt_peephole_select, 64, false, true);
        NIR_PASS(progress, nir, nir_opt_phi_precision);
        NIR_PASS(progress, nir, nir_opt_algebraic);
        NIR_PASS(progress, nir, nir_opt_constant_folding);
        NIR_PASS(progress, nir, nir_opt_deref);
        NIR_PASS(progress, nir, nir_opt_copy_prop_vars);
        NIR_PASS(progress, nir, nir_opt_undef);
        NIR_PASS(progress, nir, nir_lower_undef_to_zero);
        NIR_PASS(progress, nir, nir_opt_shrink_vectors, true);
    } while (progress);
}

static nir_shader* kernels_of(const uint32_t* spirv, size_t bytes) {
    nir_shader* nir =
        spirv_to_nir(spirv, bytes / 4, NULL, 0, MESA_SHADER_KERNEL, "kernels", &spirv_options, &options);
    if (!nir) return NULL;
    nir_validate_shader(nir, "after spirv_to_nir");
    nir_foreach_function(function, nir) function->is_exported = function->is_entrypoint;

    NIR_PASS(_, nir, nir_lower_system_values);
    NIR_PASS(_, nir, nir_lower_calls_to_builtins);
    nir_lower_compute_system_values_options system_values = {.global_id_is_32bit = true};
    NIR_PASS(_, nir, nir_lower_compute_system_values, &system_values);
    NIR_PASS(_, nir, nir_lower_variable_initializers, nir_var_function_temp);
    NIR_PASS(_, nir, nir_lower_returns);
    NIR_PASS(_, nir, nir_inline_functions);
    nir_remove_non_exported(nir);
    NIR_PASS(_, nir, nir_copy_prop);
    NIR_PASS(_, nir, nir_opt_deref);
    nir_lower_constant_to_temp(nir);
    NIR_PASS(_, nir, nir_lower_variable_initializers, ~0);
    nir_variable_mode memory =
        nir_var_shader_temp | nir_var_function_temp | nir_var_mem_shared | nir_var_mem_global;
    NIR_PASS(_, nir, nir_lower_vec3_to_vec4, memory | nir_var_mem_constant);
    NIR_PASS(_, nir, nir_lower_vars_to_explicit_types, memory | nir_var_uniform, glsl_get_cl_type_size_align);
    optimize(nir);
    NIR_PASS(_, nir, nir_remove_dead_variables, nir_var_all, NULL);
    NIR_PASS(_, nir, nir_lower_vars_to_explicit_types, memory | nir_var_mem_constant, glsl_get_cl_type_size_align);
    NIR_PASS(_, nir, nir_lower_memcpy);
    NIR_PASS(_, nir, nir_lower_explicit_io, nir_var_mem_constant, nir_address_format_64bit_global);
    NIR_PASS(_, nir, nir_lower_explicit_io, nir_var_uniform, nir_address_format_32bit_offset_as_64bit);
    NIR_PASS(_, nir, nir_lower_convert_alu_types, NULL);
    NIR_PASS(_, nir, nir_opt_if, 0);
    NIR_PASS(_, nir, nir_opt_idiv_const, 16);
    optimize(nir);
    return nir;
}

// Arguments are uniform registers, as Metal's bindings are.
static nir_def* load_kernel_input(nir_builder* b, unsigned components, unsigned bits, unsigned offset) {
    return nir_load_preamble(b, components, bits, .base = offset / 2);
}

// Mesa's statistics: instructions, registers of 16 bits, spills.
static void print_message(void* data, unsigned* id, enum util_debug_type type, const char* format, va_list args) {
    vprintf(format, args);
    printf("\n");
}

static void compile(nir_shader* kernels, nir_function* function) {
    for (unsigned i = 0; i < function->num_params; i++)
        if (!function->params[i].name) function->params[i].name = "parameter";
    struct nir_precomp_opts precompile = {.arg_align_B = 2};
    struct nir_precomp_layout layout = nir_precomp_derive_layout(&precompile, function);
    nir_shader* nir = nir_precompiled_build_variant(function, 0, &options, &precompile, load_kernel_input);
    agx_link_libagx(nir, kernels);
    NIR_PASS(_, nir, nir_lower_vars_to_explicit_types, nir_var_mem_shared, glsl_get_cl_type_size_align);
    NIR_PASS(_, nir, nir_lower_explicit_io, nir_var_mem_shared, nir_address_format_62bit_generic);
    bool progress;
    do {
        progress = false;
        NIR_PASS(progress, nir, nir_opt_loop);
    } while (progress);
    agx_preprocess_nir(nir, NULL);
    struct agx_shader_key key = {
        .dev.soft_fault = true,
        .has_scratch = true,
        .libagx = kernels,
        .promote_constants = true,
        .reserved_preamble = layout.size_B / 2,
    };
    struct util_debug_callback debug = {.debug_message = print_message};
    struct agx_shader_part compiled;
    agx_compile_shader_nir(nir, &key, &debug, &compiled);
}

int main(int argc, char** argv) {
    struct stat file;
    int descriptor = argc == 2 ? open(argv[1], O_RDONLY) : -1;
    if (descriptor < 0 || fstat(descriptor, &file) != 0) {
        fprintf(stderr, "usage: agx_report MODULE.spv\n");
        return 2;
    }
    const uint32_t* spirv = mmap(NULL, file.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    glsl_type_singleton_init_or_ref();
    options = agx_nir_options;
    options.max_unroll_iterations = 0;
    nir_shader* kernels = kernels_of(spirv, file.st_size);
    if (!kernels) return 1;
    nir_foreach_entrypoint(function, kernels) compile(kernels, function);
    return 0;
}
