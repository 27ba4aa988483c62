// From one call's shapes to what is launched, as pure data: nothing here calls the driver.

#ifndef JAX_DSA_PLAN_H_
#define JAX_DSA_PLAN_H_

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bridge.h"

namespace jax_dsa {

enum class Op { kForward, kBackward };
enum class Dtype { kBfloat16, kFloat16 };

const char* Name(Op op);
const char* Name(Dtype dtype);

// The sizes that formulas and scalars name, in the order of kSizeNames. The last is for scalars
// only: 0 where one row of sinks serves all groups, else H.
enum Size { kG, kS, kT, kK, kH, kD, kSinkStride, kNumSizes };
inline constexpr std::array<const char*, kNumSizes> kSizeNames = {"G", "S", "T",          "K",
                                                                  "H", "D", "sink_stride"};

inline constexpr int kMaxBuffers = 10;
inline constexpr int kMaxParameters = 32;
inline constexpr int kMaxParameterBytes = 4096;

// An operand or result. `dims` has a letter a dimension: one of kSizeNames, V for value_dim, 1 for
// 1 or G. `type`: 'x' is the problem's dtype, 'i' int32, 'f' float32.
struct BufferSpec {
  const char* name;
  const char* dims;
  char type;
};

// Operands, then results, of an operation, in the order of the custom call.
struct Signature {
  const BufferSpec* buffers;
  int count;
};
const Signature& SignatureOf(Op op);

// What a kernel must have been compiled for; compared by equality.
struct Facts {
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  Dtype dtype = Dtype::kBfloat16;

  bool operator==(const Facts& other) const {
    return head_dim == other.head_dim && value_dim == other.value_dim && dtype == other.dtype;
  }
};
std::string Describe(const Facts& facts);

// One call on one device, checked.
struct Problem {
  Op op = Op::kForward;
  Facts facts;
  double scale = 0;
  std::array<int64_t, kNumSizes> sizes{};
  std::array<void*, kMaxBuffers> data{};  // in the order of the signature
  std::array<size_t, kMaxBuffers> bytes{};
};

// A factor of a product: number, or ceil(sizes[size] / number).
struct Factor {
  int size;  // -1: the number itself
  int64_t number;
};
struct Formula {
  std::string text;
  std::vector<Factor> factors;
};
Formula ParseFormula(const char* text);
int64_t Evaluate(const Formula& formula, const Problem& problem);

// The place of a name in kSizeNames, or -1.
int SizeIndex(const std::string& name);
// A decimal integer from 1 to 2^31 - 1, or 0 for any other text.
int64_t Positive(const std::string& digits);

enum class ParameterKind { kPointer, kScalar, kTensorMap };
enum class ScalarType { kI32, kU32, kI64, kU64, kF32, kF64 };

struct TensorMapFormat {
  CUtensorMapDataType data_type;
  int buffer;
  std::vector<Formula> global_dim;
  std::vector<Formula> global_strides;
  std::array<uint32_t, JAX_DSA_MAX_RANK> box_dim{};
  std::array<uint32_t, JAX_DSA_MAX_RANK> element_strides{};
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill oob_fill;
};

struct Parameter {
  std::string name;
  ParameterKind kind = ParameterKind::kPointer;
  ScalarType type = ScalarType::kI32;
  int index = 0;        // of the buffer or size; kNumSizes is scale
  int tensor_map = -1;  // index into Kernel::tensor_maps
};

// A compiled kernel, parsed from a JaxDsaKernel.
struct Kernel {
  std::string symbol;
  std::string arch;
  Op op = Op::kForward;
  Facts facts;
  int major = 0;
  int minor_low = 0;
  int minor_high = 0;
  int minimum_cuda = 0;
  std::string minimum_driver;
  std::array<Formula, 3> grid;
  std::array<unsigned, 3> block{};
  std::array<unsigned, 3> cluster{};
  unsigned shared_bytes = 0;
  std::vector<Parameter> parameters;
  std::vector<TensorMapFormat> tensor_maps;
  std::vector<int> zeroed;
  std::string image_hash;
  std::string image;
};
Kernel ParseKernel(const JaxDsaKernel& kernel);

struct Memset {
  void* address;
  size_t bytes;
};

// The arguments of cuTensorMapEncodeTiled; `offset` is where the map goes among the parameters.
struct TensorMapArguments {
  CUtensorMapDataType data_type;
  cuuint32_t rank;
  void* address;
  std::array<cuuint64_t, JAX_DSA_MAX_RANK> global_dim;
  std::array<cuuint64_t, JAX_DSA_MAX_RANK> global_strides;
  std::array<cuuint32_t, JAX_DSA_MAX_RANK> box_dim;
  std::array<cuuint32_t, JAX_DSA_MAX_RANK> element_strides;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill oob_fill;
  int offset;
};

// What one call does, in this order: memsets, tensor maps, one launch.
struct LaunchPlan {
  std::array<unsigned, 3> grid;
  std::array<unsigned, 3> block;
  std::array<unsigned, 3> cluster;
  unsigned shared_bytes;
  int num_memsets = 0;
  std::array<Memset, kMaxBuffers> memsets;
  int num_tensor_maps = 0;
  std::array<TensorMapArguments, kMaxBuffers> tensor_maps;
  int num_parameters = 0;
  std::array<int, kMaxParameters> offsets;
  int parameter_bytes = 0;
  // Laid out as the kernel's parameter space: each at a multiple of its size, maps of 64 bytes.
  alignas(64) std::array<unsigned char, kMaxParameterBytes> parameters;
};

// Fills `plan`; throws where a size does not fit its scalar, its formula or the grid.
void MakePlan(const Kernel& kernel, const Problem& problem, LaunchPlan& plan);

}  // namespace jax_dsa

#endif  // JAX_DSA_PLAN_H_
