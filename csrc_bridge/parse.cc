// Kernels as Python installs them, checked and parsed; what no launcher understands is refused
// here.

#include <cstring>

#include "error.h"
#include "plan.h"

namespace jax_dsa {
namespace {

template <typename Value>
struct Named {
  const char* name;
  Value value;
};

constexpr Named<Op> kOps[] = {{"forward", Op::kForward}, {"backward", Op::kBackward}};
constexpr Named<Dtype> kDtypes[] = {{"bfloat16", Dtype::kBfloat16}, {"float16", Dtype::kFloat16}};
constexpr Named<ParameterKind> kKinds[] = {{"pointer", ParameterKind::kPointer},
                                           {"scalar", ParameterKind::kScalar},
                                           {"tensor_map", ParameterKind::kTensorMap}};
constexpr Named<ScalarType> kScalarTypes[] = {{"i32", ScalarType::kI32}, {"u32", ScalarType::kU32},
                                              {"i64", ScalarType::kI64}, {"u64", ScalarType::kU64},
                                              {"f32", ScalarType::kF32}, {"f64", ScalarType::kF64}};
constexpr Named<CUtensorMapDataType> kDataTypes[] = {
    {"UINT8", CU_TENSOR_MAP_DATA_TYPE_UINT8},     {"UINT16", CU_TENSOR_MAP_DATA_TYPE_UINT16},
    {"UINT32", CU_TENSOR_MAP_DATA_TYPE_UINT32},   {"INT32", CU_TENSOR_MAP_DATA_TYPE_INT32},
    {"UINT64", CU_TENSOR_MAP_DATA_TYPE_UINT64},   {"INT64", CU_TENSOR_MAP_DATA_TYPE_INT64},
    {"FLOAT16", CU_TENSOR_MAP_DATA_TYPE_FLOAT16}, {"FLOAT32", CU_TENSOR_MAP_DATA_TYPE_FLOAT32},
    {"FLOAT64", CU_TENSOR_MAP_DATA_TYPE_FLOAT64}, {"BFLOAT16", CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}};
constexpr Named<CUtensorMapInterleave> kInterleaves[] = {{"NONE", CU_TENSOR_MAP_INTERLEAVE_NONE},
                                                         {"16B", CU_TENSOR_MAP_INTERLEAVE_16B},
                                                         {"32B", CU_TENSOR_MAP_INTERLEAVE_32B}};
constexpr Named<CUtensorMapSwizzle> kSwizzles[] = {{"NONE", CU_TENSOR_MAP_SWIZZLE_NONE},
                                                   {"32B", CU_TENSOR_MAP_SWIZZLE_32B},
                                                   {"64B", CU_TENSOR_MAP_SWIZZLE_64B},
                                                   {"128B", CU_TENSOR_MAP_SWIZZLE_128B}};
constexpr Named<CUtensorMapL2promotion> kPromotions[] = {
    {"NONE", CU_TENSOR_MAP_L2_PROMOTION_NONE},
    {"L2_64B", CU_TENSOR_MAP_L2_PROMOTION_L2_64B},
    {"L2_128B", CU_TENSOR_MAP_L2_PROMOTION_L2_128B},
    {"L2_256B", CU_TENSOR_MAP_L2_PROMOTION_L2_256B}};
constexpr Named<CUtensorMapFloatOOBfill> kFills[] = {
    {"NONE", CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE},
    {"NAN_REQUEST_ZERO_FMA", CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA}};

template <typename Value, size_t count>
Value Lookup(const Named<Value> (&table)[count], const char* what, const char* name) {
  std::string known;
  for (const Named<Value>& row : table) {
    if (name != nullptr && std::strcmp(row.name, name) == 0) return row.value;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  Fail(ErrorKind::kInvalidArgument, what, ": got '", name ? name : "", "', want one of ", known);
}

template <typename Value, size_t count>
const char* NameIn(const Named<Value> (&table)[count], Value value) {
  for (const Named<Value>& row : table) {
    if (row.value == value) return row.name;
  }
  return "?";
}

int BufferIndex(Op op, const char* name) {
  const Signature& signature = SignatureOf(op);
  for (int i = 0; i < signature.count; ++i) {
    if (std::strcmp(signature.buffers[i].name, name) == 0) return i;
  }
  std::string known;
  for (int i = 0; i < signature.count; ++i) {
    known += (i ? ", " : "") + std::string(signature.buffers[i].name);
  }
  Fail(ErrorKind::kInvalidArgument, "got '", name, "', which is no operand or result of ", Name(op),
       ": want one of ", known);
}

int ScalarIndex(const char* name) {
  const int size = SizeIndex(name);
  if (size >= 0) return size;
  if (std::strcmp(name, "scale") == 0) return kNumSizes;
  std::string known;
  for (const char* each : kSizeNames) known += std::string(each) + ", ";
  Fail(ErrorKind::kInvalidArgument, "got scalar '", name, "', want one of ", known, "scale");
}

Facts ParseFacts(const JaxDsaKernel& kernel) {
  Facts facts;
  for (int i = 0; i < kernel.num_facts; ++i) {
    const std::string name = kernel.facts[i].name;
    const char* value = kernel.facts[i].value;
    if (name == "dtype") {
      facts.dtype = Lookup(kDtypes, "fact dtype", value);
    } else if (name == "head_dim" || name == "value_dim") {
      const int64_t number = Positive(value);
      if (number == 0) {
        Fail(ErrorKind::kInvalidArgument, "fact ", name, ": got '", value,
             "', want a positive integer");
      }
      (name == "head_dim" ? facts.head_dim : facts.value_dim) = number;
    } else {
      Fail(ErrorKind::kInvalidArgument, "got fact '", name,
           "', want head_dim, value_dim and dtype");
    }
  }
  if (facts.head_dim == 0 || facts.value_dim == 0 || kernel.num_facts != 3) {
    Fail(ErrorKind::kInvalidArgument, "got ", kernel.num_facts,
         " facts, want head_dim, value_dim and dtype");
  }
  return facts;
}

TensorMapFormat ParseTensorMap(Op op, const JaxDsaTensorMap& map) {
  TensorMapFormat format;
  if (map.rank < 1 || map.rank > JAX_DSA_MAX_RANK) {
    Fail(ErrorKind::kInvalidArgument, "got rank ", map.rank, ", want 1 to ", JAX_DSA_MAX_RANK);
  }
  format.buffer = BufferIndex(op, map.buffer);
  format.data_type = Lookup(kDataTypes, "tensorDataType", map.data_type);
  for (int i = 0; i < map.rank; ++i) {
    format.global_dim.push_back(ParseFormula(map.global_dim[i]));
    if (i > 0) format.global_strides.push_back(ParseFormula(map.global_strides[i - 1]));
    format.box_dim[i] = map.box_dim[i];
    format.element_strides[i] = map.element_strides[i];
  }
  format.interleave = Lookup(kInterleaves, "interleave", map.interleave);
  format.swizzle = Lookup(kSwizzles, "swizzle", map.swizzle);
  format.l2_promotion = Lookup(kPromotions, "l2Promotion", map.l2_promotion);
  format.oob_fill = Lookup(kFills, "oobFill", map.oob_fill);
  return format;
}

void AddParameter(const JaxDsaParameter& given, Kernel& kernel) {
  Parameter parameter;
  parameter.name = given.name;
  parameter.kind = Lookup(kKinds, "kind", given.kind);
  switch (parameter.kind) {
    case ParameterKind::kPointer: parameter.index = BufferIndex(kernel.op, given.name); break;
    case ParameterKind::kScalar:
      parameter.index = ScalarIndex(given.name);
      parameter.type = Lookup(kScalarTypes, "type", given.type);
      if ((parameter.index == kNumSizes) !=
          (parameter.type == ScalarType::kF32 || parameter.type == ScalarType::kF64)) {
        Fail(ErrorKind::kInvalidArgument, "got type ", given.type,
             "; scale is a floating-point number and every other scalar an integer");
      }
      break;
    case ParameterKind::kTensorMap:
      if (given.tensor_map == nullptr) {
        Fail(ErrorKind::kInvalidArgument, "got a tensor map without its fields");
      }
      parameter.tensor_map = static_cast<int>(kernel.tensor_maps.size());
      kernel.tensor_maps.push_back(ParseTensorMap(kernel.op, *given.tensor_map));
      break;
  }
  kernel.parameters.push_back(parameter);
}

void AddParameters(const JaxDsaKernel& given, Kernel& kernel) {
  if (given.num_parameters < 0 || given.num_parameters > kMaxParameters) {
    Fail(ErrorKind::kInvalidArgument, "got ", given.num_parameters, " parameters, want at most ",
         kMaxParameters);
  }
  for (int i = 0; i < given.num_parameters; ++i) {
    try {
      AddParameter(given.parameters[i], kernel);
    } catch (const BridgeError& error) {
      Fail(error.kind, "parameter '", given.parameters[i].name, "': ", error.what());
    }
  }
  if (kernel.tensor_maps.size() > kMaxBuffers) {
    Fail(ErrorKind::kInvalidArgument, "got ", kernel.tensor_maps.size(),
         " tensor maps, want at most ", kMaxBuffers);
  }
}

void Parse(const JaxDsaKernel& given, Kernel& kernel) {
  kernel.op = Lookup(kOps, "op", given.op);
  kernel.facts = ParseFacts(given);
  for (int i = 0; i < 3; ++i) {
    kernel.grid[i] = ParseFormula(given.grid[i]);
    kernel.block[i] = given.block[i];
    kernel.cluster[i] = given.cluster[i];
    if (given.block[i] == 0 || given.cluster[i] == 0) {
      Fail(ErrorKind::kInvalidArgument, "got a block or cluster with a size of 0");
    }
  }
  AddParameters(given, kernel);
  for (int i = 0; i < given.num_zeroed; ++i) {
    kernel.zeroed.push_back(BufferIndex(kernel.op, given.zeroed[i]));
  }
  if (given.num_zeroed > kMaxBuffers) {
    Fail(ErrorKind::kInvalidArgument, "got ", given.num_zeroed, " zeroed results, want at most ",
         kMaxBuffers);
  }
  if (given.image == nullptr || given.image_size == 0) {
    Fail(ErrorKind::kInvalidArgument, "got an empty image");
  }
}

}  // namespace

const char* Name(Op op) { return NameIn(kOps, op); }
const char* Name(Dtype dtype) { return NameIn(kDtypes, dtype); }

Kernel ParseKernel(const JaxDsaKernel& given) {
  Kernel kernel;
  kernel.symbol = given.symbol;
  kernel.arch = given.arch;
  kernel.major = given.major;
  kernel.minor_low = given.minor_low;
  kernel.minor_high = given.minor_high;
  kernel.minimum_cuda = given.minimum_cuda;
  kernel.minimum_driver = given.minimum_driver;
  kernel.shared_bytes = given.dynamic_shared_bytes;
  kernel.image_hash = given.image_hash;
  try {
    Parse(given, kernel);
  } catch (const BridgeError& error) {
    Fail(error.kind, "kernel '", kernel.symbol, "' for ", kernel.arch, ": ", error.what());
  }
  kernel.image.assign(static_cast<const char*>(given.image), given.image_size);
  return kernel;
}

}  // namespace jax_dsa
