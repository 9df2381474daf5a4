// y = x wᵀ + b in float32, for the few rows of x that one step of an engine has. See linear.py.
//
// A tile is 4 rows of x times a few rows of w: as many products as a vector has lanes. Each product is summed in a vector
// of its own, whose lanes are added at the end. The order is the same for every row, wherever in a tile it is, and for any
// number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

using torch::stable::Tensor;

// Floats in a register. 16 vectors of 16 take half of AVX-512's registers, 8 vectors of 8 half of AVX2's.
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int TILE_X = 4, TILE_W = LANES / TILE_X;  // a tile's rows of x and of w
constexpr int64_t ROWS = 32;  // rows of x for which w is read once; narrow rows fit into a core's first cache
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int LaneIndices __attribute__((vector_size(4 * LANES)));

// Adds the first half of each block of 2H lanes to its second half, and concatenates the sums of a and of b.
template <int H, int... I>
Lanes fold_halves(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (I / H * 2 * H + I % H)...) +
         __builtin_shufflevector(a, b, (I / H * 2 * H + I % H + H)...);
#else
  return __builtin_shuffle(a, b, LaneIndices{(I / H * 2 * H + I % H)...}) +
         __builtin_shuffle(a, b, LaneIndices{(I / H * 2 * H + I % H + H)...});
#endif
}

// Adds the lanes of LANES / H vectors until H lanes of each are left, in one vector. For H = 1 these are their sums.
template <int H>
Lanes sum_lanes(const Lanes* vectors) {
  if constexpr (H == LANES)
    return *vectors;
  else
    return fold_halves<H>(sum_lanes<2 * H>(vectors), sum_lanes<2 * H>(vectors + LANES / (2 * H)),
                     std::make_integer_sequence<int, LANES>());
}

// Loads a vector once. Compilers count loads as free: they would load a factor of four products four times, and the core
// would do nothing but loads.
inline Lanes load_lanes(const float* from) {
  Lanes lanes = *(const Unaligned*)from;
#ifdef __AVX__
  asm("" : "+v"(lanes));
#endif
  return lanes;
}

// Multiplies each row of x in a tile with each row of w. `next` is a row that is needed soon. The function is not inlined,
// so that its loop has all registers: inlined, it read addresses from memory for each product.
__attribute__((noinline)) Lanes products(const float* const* x, const float* const* w, int64_t width, const float* next) {
  Lanes sums[LANES] = {};
  for (int64_t k = 0; k < width; k += LANES) {
    Lanes w_lanes[TILE_W];
    for (int j = 0; j < TILE_W; j++) w_lanes[j] = load_lanes(w[j] + k);
    for (int i = 0; i < TILE_X; i++) {
      const Lanes x_lanes = load_lanes(x[i] + k);
      for (int j = 0; j < TILE_W; j++) sums[i * TILE_W + j] += x_lanes * w_lanes[j];
    }
    __builtin_prefetch(next + k);
  }
  return sum_lanes<1>(sums);
}

struct Product {
  const float *x, *w, *bias;  // [rows, width], [columns, width], [columns] or null
  float* y;                   // [rows, columns]
  int64_t rows, columns, width;

  // Where a tile reaches beyond the last row, that row is used again.
  const float* x_row(int64_t m) const { return x + std::min(m, rows - 1) * width; }
  const float* w_row(int64_t n) const { return w + std::min(n, columns - 1) * width; }

  // Computes the columns of y from `first` to `end`.
  void compute(int64_t first, int64_t end) const {
    for (int64_t from = 0; from < rows; from += ROWS)
      for (int64_t n = first; n < end; n += TILE_W) compute(from, std::min(from + ROWS, rows), n);
  }

  // Computes a tile's columns of y, from `n` on, in the rows from `from` to `to`.
  void compute(int64_t from, int64_t to, int64_t n) const {
    const float *x_rows[TILE_X], *w_rows[TILE_W];
    Lanes biases = {};
    for (int j = 0; j < TILE_W; j++) w_rows[j] = w_row(n + j);
    for (int i = 0; bias && i < LANES; i++) biases[i] = bias[std::min(n + i % TILE_W, columns - 1)];
    for (int64_t m = from; m < to; m += TILE_X) {
      for (int i = 0; i < TILE_X; i++) x_rows[i] = x_row(m + i);
      const float* next = w_row(n + TILE_W + std::min<int64_t>((m - from) / TILE_X, TILE_W - 1));
      const Lanes sums = products(x_rows, w_rows, width, next) + biases;
      for (int i = 0; i < std::min<int64_t>(TILE_X, to - m); i++) {
        float* target = y + (m + i) * columns + n;
        const float* source = (const float*)&sums + i * TILE_W;
        if (n + TILE_W <= columns)
          std::memcpy(target, source, 4 * TILE_W);
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
  // A thread pays off from 64 columns.
  torch::stable::parallel_for(0, (columns + TILE_W - 1) / TILE_W, 64 / TILE_W, [&](int64_t first, int64_t end) {
    product.compute(first * TILE_W, std::min(end * TILE_W, columns));
  });
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(rlsys, ops) { ops.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(rlsys, CPU, ops) { ops.impl("linear", TORCH_BOX(&linear)); }
