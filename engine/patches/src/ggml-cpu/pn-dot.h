// SPDX-License-Identifier: Apache-2.0
// Dot products of PN rows with F32 activations, for the CPU backend.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

void ggml_vec_dot_pn3t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc);
void ggml_vec_dot_pn4t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc);

#ifdef __cplusplus
}
#endif
