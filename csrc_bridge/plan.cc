#include "plan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "error.h"

namespace jax_dsa {
namespace {

constexpr BufferSpec kForward[] = {
    {"q", "GSHD", 'x'},  {"kv", "GTD", 'x'},   {"indices", "GSK", 'i'}, {"topk_length", "GS", 'i'},
    {"sink", "1H", 'f'}, {"out", "GSHV", 'x'}, {"lse", "GSH", 'f'},
};
constexpr BufferSpec kBackward[] = {
    {"q", "GSHD", 'x'},  {"kv", "GTD", 'x'},    {"indices", "GSK", 'i'}, {"topk_length", "GS", 'i'},
    {"lse", "GSH", 'f'}, {"alpha", "GSH", 'f'}, {"beta", "GSH", 'f'},    {"dout", "GSHV", 'x'},
    {"dq", "GSHD", 'x'}, {"dkv", "GTD", 'f'},
};
static_assert(std::size(kBackward) <= kMaxBuffers);

// Where the next parameter of this size and alignment goes.
int Reserve(LaunchPlan& plan, int size, const std::string& name) {
  const int alignment = std::min(size, 64);  // a tensor map has 128 bytes
  const int aligned = (plan.parameter_bytes + alignment - 1) / alignment * alignment;
  if (aligned + size > kMaxParameterBytes) {
    Fail(ErrorKind::kInvalidArgument, "parameter '", name, "' ends at byte ", aligned + size,
         ", want at most ", kMaxParameterBytes, " bytes of parameters");
  }
  plan.parameter_bytes = aligned + size;
  plan.offsets[plan.num_parameters++] = aligned;
  return aligned;
}

template <typename Value>
void Pack(LaunchPlan& plan, const std::string& name, Value value) {
  const int offset = Reserve(plan, sizeof(value), name);
  std::memcpy(plan.parameters.data() + offset, &value, sizeof(value));
}

template <typename Value>
void PackInteger(LaunchPlan& plan, const std::string& name, int64_t value) {
  const bool fits = value >= 0 && static_cast<uint64_t>(value) <=
                                      static_cast<uint64_t>(std::numeric_limits<Value>::max());
  if (!fits) {
    Fail(ErrorKind::kInvalidArgument, name, " = ", value, " does not fit the kernel's ",
         8 * sizeof(Value), "-bit parameter");
  }
  Pack(plan, name, static_cast<Value>(value));
}

void PackScalar(LaunchPlan& plan, const Parameter& parameter, const Problem& problem) {
  const int64_t size = parameter.index < kNumSizes ? problem.sizes[parameter.index] : 0;
  switch (parameter.type) {
    case ScalarType::kI32: return PackInteger<int32_t>(plan, parameter.name, size);
    case ScalarType::kU32: return PackInteger<uint32_t>(plan, parameter.name, size);
    case ScalarType::kI64: return PackInteger<int64_t>(plan, parameter.name, size);
    case ScalarType::kU64: return PackInteger<uint64_t>(plan, parameter.name, size);
    case ScalarType::kF32: return Pack(plan, parameter.name, static_cast<float>(problem.scale));
    case ScalarType::kF64: return Pack(plan, parameter.name, problem.scale);
  }
}

void PackTensorMap(LaunchPlan& plan, const Parameter& parameter, const TensorMapFormat& format,
                   const Problem& problem) {
  TensorMapArguments& map = plan.tensor_maps[plan.num_tensor_maps++];
  map.data_type = format.data_type;
  map.rank = static_cast<cuuint32_t>(format.global_dim.size());
  map.address = problem.data[format.buffer];
  map.box_dim = format.box_dim;
  map.element_strides = format.element_strides;
  map.global_dim.fill(0);
  map.global_strides.fill(0);
  for (cuuint32_t i = 0; i < map.rank; ++i) {
    map.global_dim[i] = Evaluate(format.global_dim[i], problem);
    if (i > 0) map.global_strides[i - 1] = Evaluate(format.global_strides[i - 1], problem);
  }
  map.interleave = format.interleave;
  map.swizzle = format.swizzle;
  map.l2_promotion = format.l2_promotion;
  map.oob_fill = format.oob_fill;
  map.offset = Reserve(plan, sizeof(CUtensorMap), parameter.name);
}

}  // namespace

const Signature& SignatureOf(Op op) {
  static constexpr Signature forward = {kForward, std::size(kForward)};
  static constexpr Signature backward = {kBackward, std::size(kBackward)};
  return op == Op::kForward ? forward : backward;
}

std::string Describe(const Facts& facts) {
  return Text("head_dim=", facts.head_dim, " value_dim=", facts.value_dim,
              " dtype=", Name(facts.dtype));
}

void MakePlan(const Kernel& kernel, const Problem& problem, LaunchPlan& plan) {
  // The driver's limits of a grid.
  constexpr std::array<int64_t, 3> kMaxGrid = {2147483647, 65535, 65535};
  for (int i = 0; i < 3; ++i) {
    const int64_t size = Evaluate(kernel.grid[i], problem);
    if (size < 1 || size > kMaxGrid[i]) {
      Fail(ErrorKind::kInvalidArgument, "kernel '", kernel.symbol, "': grid ", "xyz"[i], " = ",
           kernel.grid[i].text, " = ", size, ", want 1 to ", kMaxGrid[i]);
    }
    plan.grid[i] = static_cast<unsigned>(size);
  }
  plan.block = kernel.block;
  plan.cluster = kernel.cluster;
  plan.shared_bytes = kernel.shared_bytes;
  plan.num_memsets = plan.num_tensor_maps = plan.num_parameters = plan.parameter_bytes = 0;
  for (int buffer : kernel.zeroed) {
    plan.memsets[plan.num_memsets++] = {problem.data[buffer], problem.bytes[buffer]};
  }
  for (const Parameter& parameter : kernel.parameters) {
    switch (parameter.kind) {
      case ParameterKind::kPointer:
        Pack(plan, parameter.name, problem.data[parameter.index]);
        break;
      case ParameterKind::kScalar: PackScalar(plan, parameter, problem); break;
      case ParameterKind::kTensorMap:
        PackTensorMap(plan, parameter, kernel.tensor_maps[parameter.tensor_map], problem);
        break;
    }
  }
}

}  // namespace jax_dsa
