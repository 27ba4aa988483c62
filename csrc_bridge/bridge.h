// The plain C interface of the bridge: what Python installs and asks, through ctypes.
//
// Every function that can fail returns 0 or -1; with -1 it writes what failed, as text ending in
// a null byte, to `error` (at most `error_size` bytes). Strings and arrays are copied.

#ifndef JAX_DSA_BRIDGE_H_
#define JAX_DSA_BRIDGE_H_

#include <stddef.h>
#include <stdint.h>

#define JAX_DSA_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Grows whenever a structure or function below changes its meaning.
#define JAX_DSA_BRIDGE_VERSION 2

#define JAX_DSA_MAX_RANK 5

// A fact that a kernel serves: "head_dim", "value_dim" (decimal) or "dtype" (JAX's name).
typedef struct {
  const char* name;
  const char* value;
} JaxDsaFact;

// How a tensor-map argument is encoded; fields as in cuTensorMapEncodeTiled.
typedef struct {
  const char* data_type;                         // e.g. "BFLOAT16"
  const char* buffer;                            // operand or result whose address it takes
  int32_t rank;                                  // 1 to 5
  const char* global_dim[JAX_DSA_MAX_RANK];      // formulas, innermost first
  const char* global_strides[JAX_DSA_MAX_RANK];  // formulas, bytes, of dimensions 1 and up
  uint32_t box_dim[JAX_DSA_MAX_RANK];
  uint32_t element_strides[JAX_DSA_MAX_RANK];
  const char* interleave;    // "NONE", "16B", "32B"
  const char* swizzle;       // "NONE", "32B", "64B", "128B"
  const char* l2_promotion;  // "NONE", "L2_64B", "L2_128B", "L2_256B"
  const char* oob_fill;      // "NONE", "NAN_REQUEST_ZERO_FMA"
} JaxDsaTensorMap;

// One kernel parameter, in the order of the kernel's signature.
typedef struct {
  const char* name;  // an operand, a result, or a scalar that the launcher knows
  const char* kind;  // "pointer", "scalar", "tensor_map"
  const char* type;  // of a scalar: "i32", "u32", "i64", "u64", "f32", "f64"
  const JaxDsaTensorMap* tensor_map;
} JaxDsaParameter;

// One compiled kernel. Formulas are products of positive integers, sizes (G S T K H D) and
// ceil(SIZE/INTEGER): "G*S", "ceil(H/64)", "2*D".
typedef struct {
  const char* symbol;
  const char* arch;  // for messages
  const char* op;    // "forward", "backward"
  int32_t major;     // compute capabilities major.minor_low to major.minor_high
  int32_t minor_low;
  int32_t minor_high;
  int32_t minimum_cuda;        // that the driver must serve, e.g. 12000; 0 where none is known
  const char* minimum_driver;  // its release, for messages
  const JaxDsaFact* facts;
  int32_t num_facts;
  const JaxDsaParameter* parameters;
  int32_t num_parameters;
  const char* grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t dynamic_shared_bytes;
  const char* const* zeroed;  // results filled with zero bytes before the launch
  int32_t num_zeroed;
  const char* image_hash;  // images of one hash are loaded once
  const void* image;
  size_t image_size;
} JaxDsaKernel;

JAX_DSA_EXPORT int32_t jax_dsa_bridge_version(void);

// The minor version of the XLA FFI that the bridge was built against.
JAX_DSA_EXPORT int32_t jax_dsa_ffi_api_minor(void);

// Adds kernels; one of the same arch, op and facts is replaced.
JAX_DSA_EXPORT int32_t jax_dsa_install_kernels(const JaxDsaKernel* kernels, int32_t count,
                                               char* error, size_t error_size);

// Names of the driver functions that a table may hold, separated by spaces; those without which a
// table is refused come first, then "|", then the others.
JAX_DSA_EXPORT const char* jax_dsa_driver_functions(void);

// Sets the driver behind platform "cpu", function by function; count 0 removes it. No call of that
// platform may be running.
JAX_DSA_EXPORT int32_t jax_dsa_install_driver(const char* const* names, void* const* functions,
                                              int32_t count, char* error, size_t error_size);

// The CUDA driver: its version (e.g. 13000) and the compute capabilities (10 major + minor) of up
// to `capacity` devices; `count` says how many devices there are.
JAX_DSA_EXPORT int32_t jax_dsa_query_driver(int32_t* version, int32_t* capabilities,
                                            int32_t capacity, int32_t* count, char* error,
                                            size_t error_size);

// Kernels launched, or captured, by this process; a replayed command buffer adds nothing.
JAX_DSA_EXPORT int64_t jax_dsa_launch_count(void);

// Forgets all kernels and the driver of platform "cpu". No call may be running.
JAX_DSA_EXPORT void jax_dsa_reset(void);

#ifdef __cplusplus
}
#endif

#endif  // JAX_DSA_BRIDGE_H_
