// The gradients of the factored linear layer: see linear_panels.h.
#include "linear_panels.h"

namespace fastfact::panels {
namespace {

constexpr int64_t kItems = 16;    // wanted of work, for the threads
constexpr int64_t kTurned = 128;  // channels of an item that turns few rows
constexpr int64_t kSummed = 512;  // rows of a part of du and dv, at least
constexpr int64_t kAhead = 8;     // rows that are fetched before they are copied

template <class T>
struct Backward : Work<Compute<T>> {
  using C = Compute<T>;
  static constexpr bool kBackward = true;
  Rows<const T> x, dy;
  Rows<T> dx;           // no data where not asked for
  C *h, *dh;            // [unit][rank][row of a panel]; null where not asked for
  const T* own_values;  // in the order of `values`, in place of these where pairs are multiplied
  int64_t parts;
  C* grads;  // of the values, [parts][count]; null where not asked for
  int64_t count;
  Pieces pieces;  // of parts, by inputs
  int64_t first_unit(int64_t part) const { return part * int64_t(this->units.size()) / parts; }
};

template <class T, int B>
struct RunBackward {
  using C = Compute<T>;
  static constexpr int64_t kSlack = B / sizeof(C);

  FF_INLINE static void run(const Backward<T>& w, const Items& items) {
    const Scratch<C> x(w.i * w.half), dy(w.rows_of_dy() * w.half), dx(w.dx.data ? w.i * w.row + kSlack : 0),
        dh(w.rank * w.row);
    for (int64_t item; (item = items.take()) < items.count();) {
      for (int64_t k = w.pieces.starts[item]; k < w.pieces.starts[item + 1]; ++k) {
        const Piece& piece = w.pieces.all[k];
        for (int64_t n = w.first_unit(piece.part); n < w.first_unit(piece.part + 1); ++n) {
          with_panel<C, B>(w.units[n].rows, w.pairs, [&]<int W, int N>() FF_INLINE_LAMBDA {
            add<W, N>(w, n, piece, x.get(), dy.get(), dx.get(), dh.get());
          });
        }
      }
    }
  }

  // What the inputs of a piece have of unit n.
  template <int W, int N>
  FF_INLINE static void add(const Backward<T>& w, int64_t n, const Piece& piece, C* x, C* dy, C* dx, C* own) {
    using P = Panels<C, B, W, N>;
    const Unit& unit = w.units[n];
    const int64_t first = piece.first, last = piece.last, hidden = n * w.rank * w.row;
    C* const grads = w.grads ? w.grads + piece.part * w.count : nullptr;
    // One piece makes h and dh of the unit.
    const bool makes = first == 0;
    if (makes && w.h) {
      P::read(w, w.x, unit, w.i, x);
      P::multiply(w.u_rows, w.rank, x, w.i, nullptr, w.h + hidden);
    } else if (grads) {
      P::read(w, w.x.from_channel(first), unit, last - first, x + first * (w.pairs ? P::kHalf : P::P));
    }
    if (!w.dx.data && !grads && !(makes && w.dh)) return;
    P::read(w, w.dy, unit, w.o, dy);
    if (w.pairs) std::fill(dy + w.o * P::kHalf, dy + (w.o + 1) * P::kHalf, C(0));
    C* const dh = makes && w.dh ? w.dh + hidden : own;
    if (w.rank && (w.dx.data || (makes && w.dh))) P::multiply(w.v_rows, w.rank, dy, w.o, nullptr, dh);
    if (w.dx.data && w.rank) {
      P::multiply({w.u_columns.data + first * w.u_columns.row, w.u_columns.row, w.u_columns.step}, last - first, dh,
                  w.rank, nullptr, dx + first * P::P);
    } else if (w.dx.data) {
      std::fill(dx + first * P::P, dx + last * P::P, C(0));
    }
    auto add_nonzeros = [&]<bool kInput, bool kValues>() FF_INLINE_LAMBDA {
      for (int64_t b = 0; b < w.blocks; ++b) {
        if constexpr (P::template kPairs<T>) {
          if (w.pairs) {
            P::template add_gradients_of_halves<kInput, kValues>(w, w.own_values, b, first, last, x, dy, dx, grads);
            continue;
          }
        }
        if constexpr (N <= (B == 64 ? 8 : 4)) {
          P::template add_gradients_by_inputs<kInput, kValues>(w, b, first, last, x, dy, dx, grads);
        }
      }
    };
    if (w.dx.data && grads) add_nonzeros.template operator()<true, true>();
    if (w.dx.data && !grads) add_nonzeros.template operator()<true, false>();
    if (!w.dx.data && grads) add_nonzeros.template operator()<false, true>();
    if (w.dx.data) P::write(dx + first * P::P, unit, last - first, w.dx.from_channel(first));
  }
};

// The same of few rows, step after step. The nonzeros are taken by outputs, in so many splits.
template <class T>
struct FewBackward {
  using C = Compute<T>;
  const Backward<T>& w;
  int64_t splits, turned;   // channels of an item of the first and the last step
  C *x, *dy, *dh, *inputs;  // panels of each unit, dh, and the parts of dx [unit][split]
  enum Step { kTurn, kMultiplyFactors, kMultiply, kSum } step;
  int64_t of_x() const { return ceil_div(w.i, turned); }
  int64_t items(Step at) const {
    return int64_t(w.units.size()) * (at == kTurn       ? of_x() + ceil_div(w.o, turned)
                                      : at == kSum      ? of_x()
                                      : at == kMultiply ? splits
                                                        : 2);
  }
};

template <class T, int B>
struct RunFewBackward {
  using C = Compute<T>;
  using Few = FewBackward<T>;
  static constexpr int64_t kSlack = B / sizeof(C);

  FF_INLINE static void run(const Few& few, const Items& items) {
    const Backward<T>& w = few.w;
    const int64_t each = few.items(few.step) / int64_t(w.units.size());
    const Scratch<C> sums(few.step == Few::kSum ? std::min(few.turned, w.i) * w.row + kSlack : 0);
    for (int64_t item; (item = items.take()) < items.count();) {
      const int64_t n = item / each, k = item % each;
      with_panel<C, B>(w.units[n].rows, false,
                       [&]<int W, int N>() FF_INLINE_LAMBDA { at<W, N>(few, n, k, sums.get()); });
    }
  }

  template <int W, int N>
  FF_INLINE static void at(const Few& few, int64_t n, int64_t k, C* sums) {
    using P = Panels<C, B, W, N>;
    const Backward<T>& w = few.w;
    const Unit& unit = w.units[n];
    C *const x = few.x + n * w.i * w.row, *const dy = few.dy + n * w.o * w.row, *const dh = few.dh + n * w.rank * w.row;
    C* const inputs = few.inputs + n * few.splits * w.i * w.row;
    const auto turn = [&](const Rows<const T>& from, int64_t channels, int64_t piece, C* panel) FF_INLINE_LAMBDA {
      const int64_t first = piece * few.turned;
      P::read(w, from.from_channel(first), unit, std::min(few.turned, channels - first), panel + first * P::P);
    };
    if (few.step == Few::kTurn) {
      k < few.of_x() ? turn(w.x, w.i, k, x) : turn(w.dy, w.o, k - few.of_x(), dy);
    } else if (few.step == Few::kMultiplyFactors) {
      if (k == 0 && w.h) P::multiply(w.u_rows, w.rank, x, w.i, nullptr, w.h + n * w.rank * w.row);
      if (k == 1 && (w.dx.data || w.dh)) P::multiply(w.v_rows, w.rank, dy, w.o, nullptr, dh);
    } else if (few.step == Few::kMultiply) {
      C* const grads = w.grads ? w.grads + n * w.count : nullptr;
      C* const dx = inputs + k * w.i * w.row;
      if (w.dx.data) std::fill(dx, dx + w.i * P::P, C(0));
      auto add = [&]<bool kInput, bool kValues>() FF_INLINE_LAMBDA {
        for (int64_t b = 0; b < w.blocks; ++b) {
          P::template add_gradients<kInput, kValues>(w, b, k * w.o / few.splits, (k + 1) * w.o / few.splits, x, dy, dx,
                                                     grads);
        }
      };
      if (w.dx.data && grads) add.template operator()<true, true>();
      if (w.dx.data && !grads) add.template operator()<true, false>();
      if (!w.dx.data && grads) add.template operator()<false, true>();
    } else {
      const int64_t first = k * few.turned, count = std::min(few.turned, w.i - first);
      if (w.rank) {
        P::multiply({w.u_columns.data + first * w.u_columns.row, w.u_columns.row, w.u_columns.step}, count, dh, w.rank,
                    nullptr, sums);
      } else {
        std::fill(sums, sums + count * P::P, C(0));
      }
      for (int64_t split = 0; split < few.splits; ++split) {
        const C* const from = inputs + split * w.i * w.row + first * P::P;
        for (int64_t j = 0; j < count * P::P; ++j) sums[j] += from[j];
      }
      P::write(sums, unit, count, w.dx.from_channel(first));
    }
  }
};

// du [rank, i] = Σ dh · x and dv [rank, o] = Σ h · dy over all rows.
template <class T>
struct FactorSums {
  using C = Compute<T>;
  struct Side {
    Rows<const T> rows;
    const C* hidden;  // [unit][rank][row of a panel]
    T* out;           // null where not asked for
    int64_t panels;   // of columns
    C* sums;          // [panel][part][rank][its width], where there are several parts
  };
  const Unit* units;
  int64_t count, rank, row, parts;
  bool pairs;  // whether panels of others are in halves
  Side sides[2];
};

template <class T, int B>
struct SumFactors {
  using C = Compute<T>;
  using V = Vec<C, B>;
  using Ops = Tiles<C, B>;
  static constexpr int kWide = wide(B), L = kLanes<C, B>, kColumns = kWide * L;

  // Items are (side, panel of columns, part of the units).
  FF_INLINE static void run(const FactorSums<T>& f, int64_t begin, int64_t end) {
    const int64_t of_first = f.sides[0].panels * f.parts, size = f.rank * kColumns;
    const Scratch<C> own(f.parts > 1 ? 0 : size), recent(size), right(f.row * kColumns);
    for (int64_t item = begin; item < end; ++item) {
      const auto& side = f.sides[item >= of_first];
      const int64_t at = item - (item >= of_first ? of_first : 0), panel = at / f.parts, part = at % f.parts;
      C* const sums = f.parts > 1 ? side.sums + at * size : own.get();
      for (C* to : {sums, recent.get()}) std::memset(static_cast<void*>(to), 0, size * sizeof(C));
      const int64_t column = panel * kColumns, columns = std::min<int64_t>(kColumns, side.rows.channels - column);
      const int64_t last = (part + 1) * f.count / f.parts;
      int64_t rows = 0;  // that `recent` is of
      for (int64_t n = part * f.count / f.parts; n < last; ++n) {
        rows += f.units[n].rows;
        const bool ends = rows >= kDepth || n + 1 == last;
        if (ends) rows = 0;
        outline<B>([&]() FF_INLINE_LAMBDA {
          const Unit &unit = f.units[n], none{}, &next = n + 1 < last ? f.units[n + 1] : none;
          fill(side, unit, column, columns, right.get());
          add(f, side, unit, n, right.get(), next, column, columns, recent.get());
          for (int64_t j = 0; j < size && ends; j += L) {
            store<B>(sums + j, load<B>(sums + j) + load<B>(recent.get() + j));
            store<B>(recent.get() + j, V{});
          }
        });
      }
      if (f.parts == 1) write(f, side, column, columns, sums);
    }
  }

  FF_INLINE static const T* row_of(const typename FactorSums<T>::Side& side, int64_t row, int64_t column) {
    return side.rows.data + row * side.rows.channels + column;
  }
  FF_INLINE static void fetch(const T* from, int64_t columns) {
    for (int64_t k = 0; k < columns; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k);
  }

  // Columns of the rows of a unit, [row][kColumns].
  FF_INLINE static void fill(const typename FactorSums<T>::Side& side, const Unit& unit, int64_t column,
                             int64_t columns, C* to) {
    const T* from = row_of(side, unit.first, column);
    for (int64_t t = 0; t < unit.rows; ++t, from += side.rows.channels, to += kColumns) {
      if (t + kAhead < unit.rows) fetch(from + kAhead * side.rows.channels, columns);
      if (columns == kColumns) {
#pragma GCC unroll 4
        for (int p = 0; p < kWide; ++p) store<B>(to + p * L, load<B>(from + p * L));
      } else {
        for (int64_t k = 0; k < kColumns; ++k) to[k] = k < columns ? to_compute(from[k]) : C(0);
      }
    }
  }

  // sums[r] += Σ over the rows of a unit; what the next one reads is fetched meanwhile.
  FF_INLINE static void add(const FactorSums<T>& f, const typename FactorSums<T>::Side& side, const Unit& unit,
                            int64_t n, const C* right, const Unit& next, int64_t column, int64_t columns, C* sums) {
    const int64_t row = row_of_panel<C, B>(unit.rows, f.pairs), groups = ceil_div(f.rank, Ops::kM);
    const C* const left = side.hidden + n * f.rank * f.row;
    Ahead none{};
    for (int64_t k = 0, r = 0; k < groups; ++k) {
      for (int64_t t = k * next.rows / groups; t < (k + 1) * next.rows / groups; ++t) {
        fetch(row_of(side, next.first + t, column), columns);
      }
      const int64_t rows = (k + 1) * f.rank / groups - r;
      C* const to = sums + r * kColumns;
      Ops::template rows_of_product<kWide, Ops::kM, C>(rows, {left + r * row, row, 1}, right, kColumns, unit.rows, to,
                                                       kColumns, L, to, kColumns, none, none);
      r += rows;
    }
  }

  FF_INLINE static void write(const FactorSums<T>& f, const typename FactorSums<T>::Side& side, int64_t column,
                              int64_t columns, const C* sums) {
    for (int64_t r = 0; r < f.rank; ++r) {
      copy<B>(sums + r * kColumns, columns, side.out + r * side.rows.channels + column);
    }
  }
};

// The sums of several parts.
template <class T, int B>
struct AddFactorSums {
  FF_INLINE static void run(const FactorSums<T>& f, int64_t begin, int64_t end) {
    using Sums = SumFactors<T, B>;
    const int64_t size = f.rank * Sums::kColumns;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = f.sides[0].panels, panel = item < first ? item : item - first;
      const auto& side = f.sides[item >= first];
      auto* const sums = side.sums + panel * f.parts * size;
      for (int64_t part = 1; part < f.parts; ++part) {
        for (int64_t k = 0; k < size; ++k) sums[k] += sums[part * size + k];
      }
      const int64_t column = panel * Sums::kColumns;
      Sums::write(f, side, column, std::min<int64_t>(Sums::kColumns, side.rows.channels - column), sums);
    }
  }
};

// du and dv, null where not asked for, of h and dh in panels of `row` elements.
template <class T>
void sum_factors(const FactoredLinearBackward& op, const std::vector<Unit>& units, int64_t row, bool pairs,
                 const Compute<T>* h, const Compute<T>* dh, ParallelFor parallel_for) {
  using C = Compute<T>;
  const int64_t columns = wide(register_bytes()) * (register_bytes() / int64_t(sizeof(C)));
  FactorSums<T> f{units.data(), int64_t(units.size()), op.rank, row, 0, pairs};
  f.sides[0] = {rows_of<T>(op.x), dh, static_cast<T*>(op.du), op.du ? ceil_div(op.i, columns) : 0};
  f.sides[1] = {rows_of<T>(op.dy), h, static_cast<T*>(op.dv), op.dv ? ceil_div(op.o, columns) : 0};
  const int64_t panels = f.sides[0].panels + f.sides[1].panels;
  if (!panels || !op.rank) return;
  f.parts = std::clamp<int64_t>(std::min(ceil_div(kItems, panels), op.n / kSummed), 1, f.count);
  const Scratch<C> sums(f.parts > 1 ? panels * f.parts * op.rank * columns : 0);
  f.sides[0].sums = sums.get();
  f.sides[1].sums = sums.get() + (f.parts > 1 ? f.sides[0].panels * f.parts * op.rank * columns : 0);
  parallel(parallel_for, panels * f.parts, 1,
           [&](int64_t begin, int64_t end) { dispatch<SumFactors, T>(f, begin, end); });
  if (f.parts == 1) return;
  parallel(parallel_for, panels, 1, [&](int64_t begin, int64_t end) { dispatch<AddFactorSums, T>(f, begin, end); });
}

template <class T>
void run_few_backward(const Backward<T>& w, int64_t n, ParallelFor parallel_for) {
  using C = Compute<T>;
  const int64_t units = w.units.size();
  FewBackward<T> few{w};
  // The number of splits depends on the shape only, so that results repeat.
  const int64_t work = (w.count + w.rank * w.o) * n;
  few.splits = std::clamp<int64_t>(std::min(work / (units * kLeastWork / 2), ceil_div(kItems, units)), 1,
                                   std::max<int64_t>(w.o, 1));
  few.turned = few.splits > 1 ? kTurned : std::max({w.i, w.o, int64_t(1)});
  const Scratch<C> x(units * w.i * w.row), dy(units * w.o * w.row), dh(w.dh ? 0 : units * w.rank * w.row),
      inputs(w.dx.data ? units * few.splits * w.i * w.row : 0);
  few.x = x.get(), few.dy = dy.get(), few.dh = w.dh ? w.dh : dh.get(), few.inputs = inputs.get();
  for (auto step : {few.kTurn, few.kMultiplyFactors, few.kMultiply, few.kSum}) {
    if (step == few.kMultiplyFactors && !w.rank) continue;
    if (step == few.kSum && !w.dx.data) continue;
    few.step = step;
    const int64_t count = few.items(step);
    parallel_items(parallel_for, count, few.splits > 1 ? 1 : count,
                   [&](const Items& items) { dispatch<RunFewBackward, T>(few, items); });
  }
}

template <class T>
bool backward(const FactoredLinearBackward& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  Prepared<T, Backward<T>> prepared(op, parallel_for);
  if (!prepared.order) return false;
  Backward<T>& w = prepared.w;
  const int64_t units = w.units.size(), count = w.by_inputs ? prepared.order->sorted() : op.mu.count;
  // The number of partial sums depends on the shape only, so that results repeat.
  w.parts = std::min(units, op.dvalues ? std::clamp<int64_t>((1 << 20) / (count + 1), 8, 64) : INT64_MAX);
  const bool in_place = std::is_same_v<T, C> && w.parts == 1 && !w.by_inputs;
  const Scratch<C> grads(op.dvalues && !in_place ? w.parts * count : 0);
  w.count = count, w.x = rows_of<T>(op.x), w.dy = rows_of<T>(op.dy), w.dx = rows_of<T>(op.dx);
  const int64_t hidden = units * op.rank * w.row;
  const Scratch<C> h(op.dv ? hidden : 0), dh(op.du ? hidden : 0);
  w.h = op.dv ? h.get() : nullptr, w.dh = op.du ? dh.get() : nullptr;
  if (op.dvalues) {
    w.grads = in_place ? static_cast<C*>(op.dvalues) : grads.get();
    parallel(parallel_for, w.parts * count, 1 << 16, [&](int64_t begin, int64_t end) {
      std::memset(static_cast<void*>(w.grads + begin), 0, (end - begin) * sizeof(C));
    });
  }
  if (w.by_inputs) {
    const auto of_units = weights_of(w, register_bytes() / int64_t(sizeof(C)));
    std::vector<double> weights(w.parts);
    for (int64_t n = 0, part = 0; n < units; ++n) {
      while (n >= w.first_unit(part + 1)) ++part;
      weights[part] += of_units[n];
    }
    const double of_dy = kTurning + double(op.rank), of_x = op.dv ? 0.5 * of_dy : 0;
    const auto nonzeros = [&](int64_t i) {
      int64_t out = 0;
      for (int64_t b = 0; b < w.blocks; ++b) out += w.bounds[b * w.i + i] - w.bounds[b * w.i];
      return double(out);
    };
    w.pieces = cut(
        weights, w.i, of_dy * double(w.o) + of_x * double(w.i),
        [&](int64_t i) { return 2 * nonzeros(i) + 2 * of_dy * double(i); },
        items_for(op.threads, w.parts, 2. * double(op.n) * double(count + op.rank * op.o)));
    parallel_items(parallel_for, w.pieces.count(), 1, [&](const Items& items) { dispatch<RunBackward, T>(w, items); });
  } else {
    run_few_backward(w, op.n, parallel_for);
  }
  sum_factors<T>(op, w.units, w.row, w.pairs, h.get(), dh.get(), parallel_for);
  if (!op.dvalues || in_place) return true;
  const int32_t* const places = prepared.order->places.get();
  parallel(parallel_for, count, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t nz = begin; nz < end; ++nz) {
      C sum = 0;
      for (int64_t part = 0; part < w.parts; ++part) sum += grads.get()[part * count + nz];
      const int64_t place = w.by_inputs ? places[nz] : nz;
      if (place >= 0) static_cast<T*>(op.dvalues)[place] = from_compute<T>(sum);
    }
  });
  return true;
}

}  // namespace
}  // namespace fastfact::panels

namespace fastfact {

using namespace panels;

bool factored_linear_backward(const FactoredLinearBackward& op, ParallelFor parallel_for) {
  const bool planes = op.x.plane || op.dy.plane || (op.dx.data && op.dx.plane);
  if (!planes && in_tiles(op.type, op.n, op.i, op.o, op.mu.count, true))
    return linear_in_tiles_backward(op, parallel_for);
  bool done = op.n || ascending(op.mu, op.o * op.i, parallel_for);
  with_conv_type(op.type, [&](auto type) {
    using T = decltype(type);
    if (op.n) {
      done = backward<T>(op, parallel_for);
      return;
    }
    if (!done) return;
    if (op.dvalues) std::memset(op.dvalues, 0, op.mu.count * sizeof(T));
    if (op.du) std::memset(op.du, 0, op.rank * op.i * sizeof(T));
    if (op.dv) std::memset(op.dv, 0, op.rank * op.o * sizeof(T));
  });
  return done;
}

}  // namespace fastfact
