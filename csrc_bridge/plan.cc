#include "plan.h"

#include <cstring>
#include <limits>

#include "error.h"

namespace jax_dsa {
namespace {

// Unlike letters of `dims`, which the handlers read, names are what manifests write.
constexpr BufferSpec kForward[] = {
    {"q", "GSHD", 'x'},    {"kv", "GTD", 'x'},    {"indices", "GSK", 'i'}, {"topk_length", "GS", 'i'},
    {"sink", "1H", 'f'},   {"out", "GSHV", 'x'},  {"lse", "GSH", 'f'},
};
constexpr BufferSpec kBackward[] = {
    {"q", "GSHD", 'x'},    {"kv", "GTD", 'x'},    {"indices", "GSK", 'i'}, {"topk_length", "GS", 'i'},
    {"lse", "GSH", 'f'},   {"alpha", "GSH", 'f'}, {"beta", "GSH", 'f'},    {"dout", "GSHV", 'x'},
    {"dq", "GSHD", 'x'},   {"dkv", "GTD", 'f'},
};
static_assert(std::size(kBackward) <= kMaxBuffers);

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
constexpr Named<ScalarType> kScalarTypes[] = {
    {"i32", ScalarType::kI32}, {"u32", ScalarType::kU32}, {"i64", ScalarType::kI64},
    {"u64", ScalarType::kU64}, {"f32", ScalarType::kF32}, {"f64", ScalarType::kF64}};
constexpr Named<CUtensorMapDataType> kDataTypes[] = {
    {"UINT8", CU_TENSOR_MAP_DATA_TYPE_UINT8},       {"UINT16", CU_TENSOR_MAP_DATA_TYPE_UINT16},
    {"UINT32", CU_TENSOR_MAP_DATA_TYPE_UINT32},     {"INT32", CU_TENSOR_MAP_DATA_TYPE_INT32},
    {"UINT64", CU_TENSOR_MAP_DATA_TYPE_UINT64},     {"INT64", CU_TENSOR_MAP_DATA_TYPE_INT64},
    {"FLOAT16", CU_TENSOR_MAP_DATA_TYPE_FLOAT16},   {"FLOAT32", CU_TENSOR_MAP_DATA_TYPE_FLOAT32},
    {"FLOAT64", CU_TENSOR_MAP_DATA_TYPE_FLOAT64},   {"BFLOAT16", CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}};
constexpr Named<CUtensorMapInterleave> kInterleaves[] = {
    {"NONE", CU_TENSOR_MAP_INTERLEAVE_NONE},
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

int SizeIndex(const std::string& name) {
  for (int i = 0; i < kNumSizes; ++i) {
    if (name == kSizeNames[i]) return i;
  }
  return -1;
}

int ScalarIndex(const char* name) {
  const int size = SizeIndex(name);
  if (size >= 0) return size;
  if (std::strcmp(name, "scale") == 0) return kNumSizes;
  std::string known;
  for (const char* each : kSizeNames) known += std::string(each) + ", ";
  Fail(ErrorKind::kInvalidArgument, "got scalar '", name, "', want one of ", known, "scale");
}

// A decimal integer from 1 to 2^31 - 1, or 0.
int64_t Positive(const std::string& digits) {
  if (digits.empty() || digits.size() > 10) return 0;
  int64_t number = 0;
  for (char c : digits) {
    if (c < '0' || c > '9') return 0;
    number = 10 * number + (c - '0');
  }
  return number <= std::numeric_limits<int32_t>::max() ? number : 0;
}

bool ParseFactor(const std::string& text, Factor& factor) {
  if (const int64_t number = Positive(text); number > 0) {
    factor = {-1, number};
    return true;
  }
  std::string name = text;
  int64_t divisor = 1;
  if (text.rfind("ceil(", 0) == 0 && text.back() == ')') {
    const size_t slash = text.find('/');
    if (slash == std::string::npos) return false;
    name = text.substr(5, slash - 5);
    divisor = Positive(text.substr(slash + 1, text.size() - slash - 2));
  }
  const int size = SizeIndex(name);
  factor = {size, divisor};
  return size >= 0 && size != kSinkStride && divisor > 0;
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
    case ParameterKind::kPointer:
      parameter.index = BufferIndex(kernel.op, given.name);
      break;
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

// Where the next parameter of this size and alignment goes.
int Reserve(LaunchPlan& plan, int size, const std::string& name) {
  const int offset = (plan.parameter_bytes + size - 1) / size * size;
  // Tensor maps are aligned to 64 of their 128 bytes.
  const int aligned = size == 128 ? (plan.parameter_bytes + 63) / 64 * 64 : offset;
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

const char* Name(Op op) { return NameIn(kOps, op); }
const char* Name(Dtype dtype) { return NameIn(kDtypes, dtype); }

const Signature& SignatureOf(Op op) {
  static constexpr Signature forward = {kForward, std::size(kForward)};
  static constexpr Signature backward = {kBackward, std::size(kBackward)};
  return op == Op::kForward ? forward : backward;
}

std::string Describe(const Facts& facts) {
  return Text("head_dim=", facts.head_dim, " value_dim=", facts.value_dim,
              " dtype=", Name(facts.dtype));
}

Formula ParseFormula(const char* text) {
  Formula formula;
  formula.text = text ? text : "";
  size_t start = 0;
  while (start <= formula.text.size()) {
    size_t end = formula.text.find('*', start);
    if (end == std::string::npos) end = formula.text.size();
    Factor factor;
    if (!ParseFactor(formula.text.substr(start, end - start), factor)) {
      Fail(ErrorKind::kInvalidArgument, "formula '", formula.text,
           "': want a product of positive integers, G S T K H D and ceil(NAME/INTEGER)");
    }
    formula.factors.push_back(factor);
    start = end + 1;
  }
  return formula;
}

int64_t Evaluate(const Formula& formula, const Problem& problem) {
  int64_t product = 1;
  for (const Factor& factor : formula.factors) {
    int64_t value = factor.number;
    if (factor.size >= 0) {
      const int64_t size = problem.sizes[factor.size];
      value = size / factor.number + (size % factor.number != 0);
    }
    if (__builtin_mul_overflow(product, value, &product)) {
      Fail(ErrorKind::kInvalidArgument, "formula '", formula.text, "' exceeds 64 bits");
    }
  }
  return product;
}

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
      case ParameterKind::kScalar:
        PackScalar(plan, parameter, problem);
        break;
      case ParameterKind::kTensorMap:
        PackTensorMap(plan, parameter, kernel.tensor_maps[parameter.tensor_map], problem);
        break;
    }
  }
}

}  // namespace jax_dsa
