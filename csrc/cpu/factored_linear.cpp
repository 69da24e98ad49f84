// The factored linear layer forward: see linear_panels.h.
#include "linear_panels.h"
#include "linear_tiles.h"

namespace fastfact::panels {
namespace {

constexpr int64_t kOutputs = 96;    // outputs computed before they are written
constexpr int64_t kOfBlocks = 512;  // the same where the inputs are taken in blocks

template <class T>
struct Forward : Work<Compute<T>> {
  using C = Compute<T>;
  static constexpr bool kBackward = false;
  Rows<const T> x;
  Rows<T> y;
  const C* bias;  // a register for each output
  const T* own_values;
  Pieces pieces;  // of units, by outputs
};

template <class T, int B>
struct RunForward {
  using C = Compute<T>;
  static constexpr int64_t kSlack = B / sizeof(C);

  FF_INLINE static void run(const Forward<T>& w, const Items& items) {
    const int64_t together = std::min(w.blocks == 1 ? kOutputs : kOfBlocks, w.o);
    const Scratch<C> x(w.i * w.half), h(w.rank * w.row), y(together * w.row + kSlack);
    int64_t made = -1;  // the unit that x and h are of
    for (int64_t item; (item = items.take()) < items.count();) {
      for (int64_t n = w.pieces.starts[item]; n < w.pieces.starts[item + 1]; ++n) {
        const Piece& piece = w.pieces.all[n];
        const Unit& unit = w.units[piece.part];
        with_panel<C, B>(unit.rows, w.pairs, [&]<int W, int N>() FF_INLINE_LAMBDA {
          using P = Panels<C, B, W, N>;
          if (std::exchange(made, piece.part) != piece.part) {
            P::read(w, w.x, unit, w.i, x.get());
            if (w.rank) P::multiply(w.u_rows, w.rank, x.get(), w.i, nullptr, h.get());
          }
          for (int64_t o = piece.first; o < piece.last; o += together) {
            const int64_t last = std::min(o + together, piece.last);
            const C* const start = w.bias ? w.bias + o * kSlack : nullptr;
            if (w.rank) {
              P::multiply({w.v_columns.data + o * w.v_columns.row, w.v_columns.row, w.v_columns.step}, last - o,
                          h.get(), w.rank, start, y.get());
            }
            for (int64_t b = 0; b < w.blocks; ++b) {
              P::add_products(w, w.own_values, b, o, last, x.get(), !w.rank && b == 0, w.bias, y.get());
            }
            P::write(y.get(), unit, last - o, w.y.from_channel(o));
          }
        });
      }
    }
  }
};

template <class T>
bool forward(const FactoredLinear& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  Prepared<T, Forward<T>> prepared(op, parallel_for);
  if (!prepared.order) return false;
  Forward<T>& w = prepared.w;
  const int64_t lanes = register_bytes() / sizeof(C);
  const Scratch<C> bias(op.bias ? op.o * lanes : 0);
  for (int64_t o = 0; o < op.o && op.bias; ++o) {
    std::fill_n(bias.get() + o * lanes, lanes, to_compute(static_cast<const T*>(op.bias)[o]));
  }
  w.own_values = static_cast<const T*>(op.mu.values);
  w.x = rows_of<T>(op.x), w.y = rows_of<T>(op.y), w.bias = op.bias ? bias.get() : nullptr;
  const double of_channel = kTurning + double(op.rank);
  const auto nonzeros = [&](int64_t o) { return o < w.o ? double(w.bounds[o * (w.blocks + 1)]) : double(op.mu.count); };
  w.pieces = cut(
      weights_of(w, lanes), w.o, of_channel * double(w.i),
      [&](int64_t o) { return nonzeros(o) + of_channel * double(o); },
      items_for(op.threads, w.units.size(), double(op.n) * double(op.mu.count + op.rank * op.o)));
  parallel_items(parallel_for, w.pieces.count(), 1, [&](const Items& items) { dispatch<RunForward, T>(w, items); });
  return true;
}

}  // namespace
}  // namespace fastfact::panels

namespace fastfact {

using namespace panels;

bool factored_linear(const FactoredLinear& op, ParallelFor parallel_for) {
  if (!op.x.plane && !op.y.plane && in_tiles(op.type, op.n, op.i, op.o, op.mu.count, false)) {
    return linear_in_tiles(op, parallel_for);
  }
  if (!op.n || !op.o) return ascending(op.mu, op.o * op.i, parallel_for);
  bool done = false;
  with_conv_type(op.type, [&](auto type) { done = forward<decltype(type)>(op, parallel_for); });
  return done;
}

}  // namespace fastfact
