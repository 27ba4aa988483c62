// Formulas: products of positive integers, sizes and ceil(SIZE/INTEGER).

#include <limits>

#include "error.h"
#include "plan.h"

namespace jax_dsa {
namespace {

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

}  // namespace

int64_t Positive(const std::string& digits) {
  if (digits.empty() || digits.size() > 10) return 0;
  int64_t number = 0;
  for (char c : digits) {
    if (c < '0' || c > '9') return 0;
    number = 10 * number + (c - '0');
  }
  return number <= std::numeric_limits<int32_t>::max() ? number : 0;
}

int SizeIndex(const std::string& name) {
  for (int i = 0; i < kNumSizes; ++i) {
    if (name == kSizeNames[i]) return i;
  }
  return -1;
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

}  // namespace jax_dsa
