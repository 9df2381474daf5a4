// y = x wᵀ + b in float32, for the few rows of x that a step of an engine has. See linear.py.
//
// 4 rows of x times some of w make a tile. Each of its sums is made in so many lanes as there are sums, added up at the end: in
// the same order for every row, wherever in a tile it is, and however many threads there are.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

using torch::stable::Tensor;

// As many as a register holds: 16 sums of 16 are half of the registers of AVX-512, 8 sums of 8 half of those of AVX2.
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int TALL = 4, WIDE = LANES / TALL;  // a tile's rows of x and of w
constexpr int64_t ROWS = 32;  // of x, for which w is read once; narrow ones fit into a core's first cache
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int Places __attribute__((vector_size(4 * LANES)));

// Of blocks of 2H lanes, the first half added to the second: those of a, then those of b.
template <int H, int... I>
Lanes halved(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (I / H * 2 * H + I % H)...) +
         __builtin_shufflevector(a, b, (I / H * 2 * H + I % H + H)...);
#else
  return __builtin_shuffle(a, b, Places{(I / H * 2 * H + I % H)...}) +
         __builtin_shuffle(a, b, Places{(I / H * 2 * H + I % H + H)...});
#endif
}

// Of LANES / H vectors, one after the other, what is left when their lanes are added up to H each: for H = 1, the sums.
template <int H>
Lanes added_up(const Lanes* vectors) {
  if constexpr (H == LANES)
    return *vectors;
  else
    return halved<H>(added_up<2 * H>(vectors), added_up<2 * H>(vectors + LANES / (2 * H)),
                     std::make_integer_sequence<int, LANES>());
}

// Loaded once. Compilers take loads for free, and load what is multiplied four times four times: then loads are all a core does.
inline Lanes loaded(const float* from) {
  Lanes lanes = *(const Unaligned*)from;
#ifdef __AVX__
  asm("" : "+v"(lanes));
#endif
  return lanes;
}

// Each of some rows of x times each of some rows of w. `next` is a row that is wanted soon. A function of its own, so that the loop
// has all registers: within its caller's, addresses were fetched from elsewhere for each product.
__attribute__((noinline)) Lanes products(const float* const* x, const float* const* w, int64_t width, const float* next) {
  Lanes sums[LANES] = {};
  for (int64_t k = 0; k < width; k += LANES) {
    Lanes of_w[WIDE];
    for (int j = 0; j < WIDE; j++) of_w[j] = loaded(w[j] + k);
    for (int i = 0; i < TALL; i++) {
      const Lanes of_x = loaded(x[i] + k);
      for (int j = 0; j < WIDE; j++) sums[i * WIDE + j] += of_x * of_w[j];
    }
    __builtin_prefetch(next + k);
  }
  return added_up<1>(sums);
}

struct Product {
  const float *x, *w, *bias;  // [rows, width], [columns, width], [columns] or null
  float* y;                   // [rows, columns]
  int64_t rows, columns, width;

  // Where a tile reaches beyond the last row, that row is taken again.
  const float* row_of_x(int64_t m) const { return x + std::min(m, rows - 1) * width; }
  const float* row_of_w(int64_t n) const { return w + std::min(n, columns - 1) * width; }

  // The columns of y from `first` to `end`.
  void compute(int64_t first, int64_t end) const {
    for (int64_t from = 0; from < rows; from += ROWS)
      for (int64_t n = first; n < end; n += WIDE) compute(from, std::min(from + ROWS, rows), n);
  }

  // Of a tile's columns of y, the rows from `from` to `to`.
  void compute(int64_t from, int64_t to, int64_t n) const {
    const float *of_x[TALL], *of_w[WIDE];
    Lanes biases = {};
    for (int j = 0; j < WIDE; j++) of_w[j] = row_of_w(n + j);
    for (int i = 0; bias && i < LANES; i++) biases[i] = bias[std::min(n + i % WIDE, columns - 1)];
    for (int64_t m = from; m < to; m += TALL) {
      for (int i = 0; i < TALL; i++) of_x[i] = row_of_x(m + i);
      const float* next = row_of_w(n + WIDE + std::min<int64_t>((m - from) / TALL, WIDE - 1));
      const Lanes found = products(of_x, of_w, width, next) + biases;
      for (int i = 0; i < std::min<int64_t>(TALL, to - m); i++) {
        float* target = y + (m + i) * columns + n;
        const float* source = (const float*)&found + i * WIDE;
        if (n + WIDE <= columns)
          std::memcpy(target, source, 4 * WIDE);
        else
          std::memcpy(target, source, 4 * (columns - n));
      }
    }
  }
};

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  x = torch::stable::contiguous(x);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  const int64_t columns = weight.size(0), width = weight.size(1);
  shape.back() = columns;
  Tensor y = torch::stable::new_empty(x, shape);
  const float* biases = bias ? bias->const_data_ptr<float>() : nullptr;
  const Product product{x.const_data_ptr<float>(), weight.const_data_ptr<float>(), biases, y.mutable_data_ptr<float>(),
                        x.numel() / width, columns, width};
  // 64 columns are worth a thread.
  torch::stable::parallel_for(0, (columns + WIDE - 1) / WIDE, 64 / WIDE, [&](int64_t first, int64_t end) {
    product.compute(first * WIDE, std::min(end * WIDE, columns));
  });
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(rlsys, ops) { ops.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(rlsys, CPU, ops) { ops.impl("linear", TORCH_BOX(&linear)); }
