#include "launch.h"

#include <atomic>

namespace jax_dsa {
namespace {

std::atomic<int64_t> launches{0};

void Encode(const Driver& driver, const Ready& ready, const TensorMapArguments& map,
            LaunchPlan& plan) {
  auto* encoded = reinterpret_cast<CUtensorMap*>(plan.parameters.data() + map.offset);
  JAX_DSA_CALL(
      driver, [&] { return ready.Who(); }, cuTensorMapEncodeTiled, encoded, map.data_type, map.rank,
      map.address, map.global_dim.data(), map.global_strides.data(), map.box_dim.data(),
      map.element_strides.data(), map.interleave, map.swizzle, map.l2_promotion, map.oob_fill);
}

}  // namespace

void Launch(const Driver& driver, const Ready& ready, LaunchPlan& plan, CUstream stream) {
  const auto who = [&ready] { return ready.Who(); };
  for (int i = 0; i < plan.num_tensor_maps; ++i) Encode(driver, ready, plan.tensor_maps[i], plan);
  for (int i = 0; i < plan.num_memsets; ++i) {
    const auto address = reinterpret_cast<CUdeviceptr>(plan.memsets[i].address);
    JAX_DSA_CALL(driver, who, cuMemsetD8Async, address, 0, plan.memsets[i].bytes, stream);
  }
  void* parameters[kMaxParameters];
  for (int i = 0; i < plan.num_parameters; ++i) {
    parameters[i] = plan.parameters.data() + plan.offsets[i];
  }
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim.x = plan.cluster[0];
  attribute.value.clusterDim.y = plan.cluster[1];
  attribute.value.clusterDim.z = plan.cluster[2];
  CUlaunchConfig config{};
  config.gridDimX = plan.grid[0];
  config.gridDimY = plan.grid[1];
  config.gridDimZ = plan.grid[2];
  config.blockDimX = plan.block[0];
  config.blockDimY = plan.block[1];
  config.blockDimZ = plan.block[2];
  config.sharedMemBytes = plan.shared_bytes;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.cluster[0] * plan.cluster[1] * plan.cluster[2] > 1 ? 1 : 0;
  JAX_DSA_CALL(driver, who, cuLaunchKernelEx, &config, ready.function, parameters, nullptr);
  launches.fetch_add(1, std::memory_order_relaxed);
}

int64_t LaunchCount() { return launches.load(std::memory_order_relaxed); }

}  // namespace jax_dsa
