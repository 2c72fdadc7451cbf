// The roles of consumer warps of the decode kernel for latent caches, if there are score warpgroups.
#pragma once
#include "hopper/latent_scores.cuh"
#include "hopper/latent_values.cuh"

namespace latent {

// Runs a consumer warp of the CTA, by its role.
template <class Scores, class Values> static __device__ __forceinline__ void
run_role(const AttentionParameters &params, Shared &shared, Exchange &exchange, int warp, int lane) {
    Consumer common = {params, shared, exchange, shared_address(dynamic_shared), warp / 4, warp % 4, lane};
    if (warp >= SCORE_WARP) {
        set_registers<SCORE_REGISTERS>();
        Scores rows = {common};
        run_scores(rows);
    } else {
        set_registers<VALUE_REGISTERS>();
        Values rows = {common};
        run_values(rows);
    }
}

} // namespace latent
