// A plan carried out: the only driver calls of a jitted call that has run before.

#ifndef JAX_DSA_LAUNCH_H_
#define JAX_DSA_LAUNCH_H_

#include <cstdint>

#include "plan.h"
#include "registry.h"

namespace jax_dsa {

// Encodes the plan's tensor maps into its parameters, enqueues its memsets and its kernel.
void Launch(const Driver& driver, const Ready& ready, LaunchPlan& plan, CUstream stream);

// How many times Launch has enqueued a kernel.
int64_t LaunchCount();

}  // namespace jax_dsa

#endif  // JAX_DSA_LAUNCH_H_
