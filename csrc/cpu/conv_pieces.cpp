// A convolution with its weight, of float32, by AMX (pieces.h): images [n, h, w, channels], W [o, kh, kw, i], stride 1.
//
// The padded rows of an image lie one after the other, so that from an output to the next one, and from a tap to
// another, what is read moves by a number of pixels that is the same for all outputs; what is computed of the few
// pixels between two rows is left out. A tile of a product then is 32 pixels as they lie.
//
//   y[p] = Σ_tap x[p + tap] Wᵀ[tap]     dx[p] = Σ_tap dy[p − tap] W[tap]     dW[tap] = Σ_p dy[p]ᵀ x[p + tap]
//
// x is split for each band of outputs, W once. For dW the pixels are the terms: x is turned, and may begin anywhere.
#include <vector>

#include "factored_conv.h"
#include "items.h"
#include "linear_tiles.h"

namespace fastfact {
namespace {

constexpr int64_t kBand = 1 << 18;         // numbers of bfloat16 of the pixels of a band
constexpr int64_t kLeastBand = 128;        // outputs
constexpr int64_t kLargePanels = 1 << 18;  // numbers of 32 bits of a W that leaves the second cache
constexpr int64_t kSumOfTerms = 1024;      // added by AMX one after the other
constexpr double kMostPadding = 2;         // by which as much is computed as is wanted, and oneDNN takes as long
constexpr int64_t kPixels = 96;            // that repay that W is split for each call
constexpr int64_t kTurned = 3 << 19;       // numbers of bfloat16 of x and dy for dW at once

// An image as padded rows one after the other.
struct PaddedImages {
  int64_t n, h, w, channels, top, left;  // what is before the image
  int64_t oh, ow, wide;                  // outputs, pixels of a padded row

  // The pixel at a place of a padded image, null outside the image.
  FF_INLINE const float* at(const float* images, int64_t image, int64_t place) const {
    const int64_t y = place / wide - top, x = place % wide - left;
    return y >= 0 && y < h && x >= 0 && x < w ? images + ((image * h + y) * w + x) * channels : nullptr;
  }
  int64_t outputs() const { return oh * wide; }
};

// The taps of a kernel, as how far on they read.
struct Taps {
  int64_t kh, kw, down, right;  // from one to the next

  int64_t count() const { return kh * kw; }
  int64_t offset(int64_t tap) const { return tap / kw * down + tap % kw * right; }
  int64_t furthest() const { return offset(count() - 1); }
};

// Panels of W [panel of columns][tap][block of terms] in pieces.
struct Panels {
  int64_t terms, columns, blocks;
  Panels(int64_t terms, int64_t columns) : terms(terms), columns(columns), blocks(ceil_div(terms, kAmxTerms)) {}
  int64_t count() const { return ceil_div(columns, kRowsByAmx); }
  FF_INLINE int64_t of_tap() const { return blocks * kPieces * kAmxRows * kRowsByAmx; }  // numbers of 32 bits
};

template <class, int B>
struct MakeConvPanels {
  static constexpr int L = B / int(sizeof(float)), NR = 2 * L;
  using V = Vec<float, B>;
  static constexpr int64_t kAhead = 16;  // rows of W that are fetched before they are split

  // Items are (panel, tap). turned: terms are inputs and columns outputs; else they are the other way round, and the
  // taps in reverse, as dx has them.
  FF_INLINE static void run(const float* w, int64_t o, int64_t i, int64_t count, bool turned, const Panels& of,
                            float* to, int64_t begin, int64_t end) {
    if constexpr (B == 64) {
      const int64_t row = count * i;
      for (int64_t item = begin; item < end; ++item) {
        const int64_t column = item / count * NR, tap = item % count;
        const float* const from = w + (turned ? tap : count - 1 - tap) * i;
        float* const panel = to + item * of.of_tap();
        outline<B>([&]() FF_INLINE_LAMBDA {
          turned ? turn(from + column * row, row, std::min<int64_t>(NR, o - column), i, panel)
                 : take(from + column, row, o, std::min<int64_t>(NR, i - column), panel);
        });
      }
    }
  }

  FF_INLINE static void take(const float* from, int64_t row, int64_t terms, int64_t columns, float* to) {
    for (int64_t t = 0; t < whole(terms, kAmxTerms); t += 2) {
      for (int64_t ahead = t + kAhead; ahead < t + kAhead + 2; ++ahead) {
        __builtin_prefetch(from + ahead * row);
        __builtin_prefetch(from + ahead * row + L);
      }
      SplitPanel<float, B>::split_pairs(t < terms ? from + t * row : nullptr,
                                        t + 1 < terms ? from + (t + 1) * row : nullptr, columns,
                                        to + SplitPanel<float, B>::place(t));
    }
  }

  FF_INLINE static void turn(const float* from, int64_t row, int64_t columns, int64_t terms, float* to) {
    alignas(B) float block[kAmxTerms * NR];
    for (int64_t t = 0; t < terms; t += kAmxTerms) {
      for (int64_t part = 0; part < NR; part += L) {
        for (int64_t some = 0; some < kAmxTerms; some += L) {
          V lines[L];
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) {
            const float* const line = part + l < columns ? from + (part + l) * row + t + some : nullptr;
            __builtin_prefetch(line + 2 * kAmxTerms);
            lines[l] = SplitPanel<float, B>::some(line, terms - t - some);
          }
          PackPanels<float, B>::template transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<B>(block + (some + l) * NR + part, lines[l]);
        }
      }
      for (int64_t k = 0; k < kAmxTerms; k += 2) {
        SplitPanel<float, B>::split_pairs(block + k * NR, block + (k + 1) * NR, NR,
                                          to + SplitPanel<float, B>::place(t + k));
      }
    }
  }
};

struct ConvProduct {
  PaddedImages of;
  Taps taps;
  Panels panels;
  const float *x, *w, *bias;  // w: the panels
  float* y;
  int64_t pixel;         // numbers of bfloat16 from one pixel in pieces to the next
  int64_t images, band;  // of an item, and outputs of each
  int64_t bands, sets;   // of an image, and of images
  int64_t group;         // panels of an item
  int64_t stretch() const { return whole(band, kRowsByAmx) + taps.furthest(); }  // pixels of a band
};

template <class, int B>
struct RunConvProduct {
  static constexpr int L = B / int(sizeof(float)), NR = 2 * L;
  using V = Vec<float, B>;

  // Items are (group of panels, set of images, band).
  FF_INLINE static void run(const ConvProduct& p, const Items& items) {
    if constexpr (B == 64) {
      const PaddedImages& of = p.of;
      const Scratch<BFloat16> pixels(p.images * p.stretch() * p.pixel);
      const AmxTiles tiles(true);
      int64_t split = -1;
      for (int64_t item; (item = items.take()) < items.count();) {
        const int64_t part = item % (p.sets * p.bands), image = part / p.bands * p.images;
        const int64_t first = part % p.bands * p.band, count = std::min(p.band, of.outputs() - first);
        const int64_t images = std::min(p.images, of.n - image);
        if (split != part) {
          outline<B>([&]() FF_INLINE_LAMBDA {
            BFloat16* to = pixels.get();
            for (int64_t k = image; k < image + images; ++k) {
              for (int64_t place = first; place < first + p.stretch(); ++place, to += p.pixel) {
                split_pixel(of.at(p.x, k, place), of.channels, to);
              }
            }
          });
          split = part;
        }
        const int64_t panel = item / (p.sets * p.bands) * p.group;
        for (int64_t k = panel; k < std::min(p.panels.count(), panel + p.group); ++k) {
          outline<B>([&]() FF_INLINE_LAMBDA {
            for (int64_t m = 0; m < images; ++m) {
              multiply(p, pixels.get() + m * p.stretch() * p.pixel, image + m, first, count, k * NR);
            }
          });
        }
      }
    }
  }

  // Numbers of a pixel in pieces, [block][piece][channel]; zeros if it is null.
  FF_INLINE static void split_pixel(const float* from, int64_t channels, BFloat16* to) {
    if (!from) return void(std::fill_n(to, in_pieces(channels), BFloat16{}));
    for (int64_t t = 0; t < channels; t += kAmxTerms, to += kPieces * kAmxTerms) {
      alignas(B) float rest[kAmxTerms] = {};
      const float* at = from + t;
      if (channels - t < kAmxTerms) {
        std::memcpy(rest, at, (channels - t) * sizeof(float));
        at = rest;
      }
      SplitRows<float, B>::split_terms(at, to, kAmxTerms);
    }
  }

  // A panel of columns of a band.
  FF_INLINE static void multiply(const ConvProduct& p, const BFloat16* pixels, int64_t image, int64_t first,
                                 int64_t count, int64_t column) {
    const int64_t pixel = p.pixel, bytes = pixel * sizeof(BFloat16), taps = p.taps.count();
    const int64_t together = std::max<int64_t>(1, kSumOfTerms / (p.panels.blocks * kAmxTerms));
    const float* const panel = p.w + column / NR * taps * p.panels.of_tap();
    const bool wide = p.panels.columns - column > L;
    for (int64_t q = 0; q < count; q += kRowsByAmx) {
      alignas(64) float sums[kRowsByAmx * NR];
      auto by = [&]<int R, int N>() FF_INLINE_LAMBDA {
        using S = AmxSums<R, N>;
        for (int64_t tap = 0; tap < taps; tap += together) {
          S::clear();
          for (int64_t k = tap; k < std::min(taps, tap + together); ++k) {
            const auto* const left = reinterpret_cast<const char*>(pixels + (q + p.taps.offset(k)) * pixel);
            S::multiply_pieces(left, bytes, kAmxRows * bytes, kAmxTerms * sizeof(BFloat16),
                               kPieces * kAmxTerms * sizeof(BFloat16), panel + k * p.panels.of_tap(), p.panels.blocks,
                               []() FF_INLINE_LAMBDA {});
          }
          tap ? S::add_to(sums) : S::store(sums, NR);
        }
        give<N>(p, image, first + q, std::min<int64_t>(R * kAmxRows, count - q), column, sums);
      };
      if (count - q > kAmxRows) {
        wide ? by.template operator()<2, 2>() : by.template operator()<2, 1>();
      } else {
        wide ? by.template operator()<1, 2>() : by.template operator()<1, 1>();
      }
    }
  }

  template <int N>
  FF_INLINE static void give(const ConvProduct& p, int64_t image, int64_t place, int64_t rows, int64_t column,
                             const float* sums) {
    const int64_t columns = p.panels.columns, count = std::min<int64_t>(N * L, columns - column);
    int64_t y = place / p.of.wide, x = place % p.of.wide;
    V bias[N]{};
    for (int k = 0; k < N && p.bias; ++k) bias[k] = load<B>(p.bias + column + k * L);
    for (int64_t m = 0; m < rows; ++m) {
      if (x < p.of.ow) {
        float* const to = p.y + ((image * p.of.oh + y) * p.of.ow + x) * columns + column;
        alignas(B) float numbers[NR];
        float* const out = count == N * L ? to : numbers;
#pragma GCC unroll 2
        for (int k = 0; k < N; ++k) store<B>(out + k * L, load<B>(sums + m * NR + k * L) + bias[k]);
        if (count < N * L) std::memcpy(to, numbers, count * sizeof(float));
      }
      if (++x == p.of.wide) x = 0, ++y;
    }
  }
};

// From one pixel in pieces to the next: an odd number of lines of memory, so that those of a tile share no set of the
// first cache.
int64_t pixel_of(const PaddedImages& of) { return (in_pieces(of.channels) / kAmxTerms | 1) * kAmxTerms; }

void make_panels(const float* w, int64_t o, int64_t i, int64_t taps, bool turned, const Panels& panels, float* to,
                 ParallelFor parallel_for) {
  parallel(parallel_for, panels.count() * taps, 1, [&](int64_t begin, int64_t end) {
    dispatch<MakeConvPanels, float>(w, o, i, taps, turned, panels, to, begin, end);
  });
}

// y of images, W as panels.
void multiply_images(const PaddedImages& of, const Taps& taps, const Panels& panels, const float* x, const float* made,
                     const float* bias, float* y, int64_t threads, ParallelFor parallel_for) {
  const int64_t count = panels.count();
  const Padded<float> padded_bias(bias, bias ? 1 : 0, panels.columns);
  ConvProduct p{of, taps, panels, x, made, bias ? padded_bias.data : nullptr, y};
  p.pixel = pixel_of(of);
  // A band has at least as many outputs as it reads pixels beyond them.
  const int64_t fits = std::max({kBand / p.pixel - taps.furthest(), taps.furthest(), kLeastBand});
  const int64_t most = ceil_div(fits, kRowsByAmx), tiles = ceil_div(of.outputs(), kRowsByAmx);
  // Of a large W each thread reads its own part.
  const bool large = count * taps.count() * panels.of_tap() > kLargePanels;
  p.bands = ceil_div(tiles, most);
  while (!large && of.n * p.bands < 2 * threads && p.bands < tiles / 4) ++p.bands;
  p.band = ceil_div(tiles, p.bands) * kRowsByAmx, p.bands = ceil_div(of.outputs(), p.band);
  p.images = p.bands > 1 ? 1 : std::clamp<int64_t>(kBand / (p.stretch() * p.pixel), 1, of.n);
  if (!large) p.images = std::min(p.images, ceil_div(of.n, 2 * threads));
  p.sets = ceil_div(of.n, p.images), p.images = ceil_div(of.n, p.sets);
  const int64_t groups = large || p.sets * p.bands < threads ? std::min(count, threads) : 1;
  p.group = ceil_div(count, groups);
  parallel_items(parallel_for, ceil_div(count, p.group) * p.sets * p.bands, 1,
                 [&](const Items& items) { dispatch<RunConvProduct, float>(p, items); });
}

// Some outputs of an image, of which dW is summed together.
struct Stretch {
  int64_t image, first, count;
};

// dW of some stretches, from x turned and dy in panels.
struct ConvGradient {
  PaddedImages of;
  Taps taps;
  int64_t o;
  const float *x, *dy;
  const Stretch* stretches;
  int64_t count, blocks, line;  // blocks of 32 outputs and pixels of a line of turned x, of each stretch
  BFloat16* turned;             // [stretch][piece][channel][line]
  float* panels;                // [panel of outputs][stretch][block][piece][pair][32 outputs]
  float* dw;                    // [o, kh, kw, i]
  bool fresh;

  int64_t channels() const { return whole(of.channels, kRowsByAmx); }
  int64_t of_stretch() const { return kPieces * channels() * line; }
  int64_t of_panel() const { return blocks * kPieces * kAmxRows * kRowsByAmx; }  // of a stretch
};

template <class, int B>
struct TurnPixels {
  static constexpr int L = B / int(sizeof(float));

  // Items are (stretch, 32 pixels of a line).
  FF_INLINE static void run(const ConvGradient& g, int64_t begin, int64_t end) {
    if constexpr (B == 64) {
      const int64_t parts = g.line / kAmxTerms;
      for (int64_t item = begin; item < end; ++item) {
        const Stretch& stretch = g.stretches[item / parts];
        const int64_t part = item % parts * kAmxTerms;
        BFloat16* const to = g.turned + item / parts * g.of_stretch() + part;
        outline<B>([&]() FF_INLINE_LAMBDA { turn(g, stretch.image, stretch.first + part, to); });
      }
    }
  }

  FF_INLINE static void turn(const ConvGradient& g, int64_t image, int64_t place, BFloat16* to) {
    const float* pixels[kAmxTerms];
    for (int64_t k = 0; k < kAmxTerms; ++k) pixels[k] = g.of.at(g.x, image, place + k);
    const int64_t channels = g.channels(), piece = channels * g.line;
    for (int64_t c = 0; c < channels; c += L) {
      float* const pairs = reinterpret_cast<float*>(to + c * g.line);
      TurnRows<float, B>::run(pixels, c, g.of.channels, pairs, g.line / 2, piece / 2);
    }
  }
};

template <class, int B>
struct PanelsOfDy {
  // Items are (panel, stretch).
  FF_INLINE static void run(const ConvGradient& g, int64_t begin, int64_t end) {
    if constexpr (B == 64) {
      for (int64_t item = begin; item < end; ++item) {
        const Stretch& s = g.stretches[item % g.count];
        const int64_t column = item / g.count * kRowsByAmx;
        float* const to = g.panels + item * g.of_panel();
        outline<B>([&]() FF_INLINE_LAMBDA {
          for (int64_t q = 0; q < g.blocks * kAmxTerms; q += 2) {
            SplitPanel<float, B>::split_pairs(at(g, s, q, column), at(g, s, q + 1, column), g.o - column,
                                              to + SplitPanel<float, B>::place(q));
          }
        });
      }
    }
  }

  FF_INLINE static const float* at(const ConvGradient& g, const Stretch& s, int64_t q, int64_t column) {
    const int64_t y = (s.first + q) / g.of.wide, x = (s.first + q) % g.of.wide;
    return q < s.count && x < g.of.ow ? g.dy + ((s.image * g.of.oh + y) * g.of.ow + x) * g.o + column : nullptr;
  }
};

template <class, int B>
struct RunConvGradient {
  static constexpr int L = B / int(sizeof(float)), NR = 2 * L;
  using V = Vec<float, B>;

  // Items are (panel of outputs, 32 channels, tap).
  FF_INLINE static void run(const ConvGradient& g, const Items& items) {
    if constexpr (B == 64) {
      const AmxTiles tiles(true);
      const int64_t across = g.channels() / kRowsByAmx, taps = g.taps.count();
      for (int64_t item; (item = items.take()) < items.count();) {
        const int64_t panel = item / (across * taps), channel = item / taps % across * kRowsByAmx, tap = item % taps;
        outline<B>([&]() FF_INLINE_LAMBDA { sum(g, panel, channel, tap); });
      }
    }
  }

  FF_INLINE static void sum(const ConvGradient& g, int64_t panel, int64_t channel, int64_t tap) {
    constexpr int64_t kSize = sizeof(BFloat16);
    const int64_t row = g.line * kSize, piece = g.channels() * row;
    const int64_t together = std::max<int64_t>(1, kSumOfTerms / (g.blocks * kAmxTerms));
    alignas(64) float sums[kRowsByAmx * NR];
    auto by = [&]<int R, int N>() FF_INLINE_LAMBDA {
      using S = AmxSums<R, N>;
      for (int64_t first = 0; first < g.count; first += together) {
        S::clear();
        for (int64_t s = first; s < std::min(g.count, first + together); ++s) {
          const BFloat16* const left = g.turned + s * g.of_stretch() + channel * g.line + g.taps.offset(tap);
          S::multiply_pieces(reinterpret_cast<const char*>(left), row, kAmxRows * row, piece, kAmxTerms * kSize,
                             g.panels + (panel * g.count + s) * g.of_panel(), g.blocks, []() FF_INLINE_LAMBDA {});
        }
        first ? S::add_to(sums) : S::store(sums, NR);
      }
    };
    const bool wide = g.o - panel * NR > L;
    if (g.of.channels - channel > kAmxRows) {
      wide ? by.template operator()<2, 2>() : by.template operator()<2, 1>();
    } else {
      wide ? by.template operator()<1, 2>() : by.template operator()<1, 1>();
    }
    // Sums are [channel][output].
    for (int64_t c = 0; c < kRowsByAmx && channel + c < g.of.channels; c += L) {
      for (int64_t part = 0; part < NR && panel * NR + part < g.o; part += L) {
        V lines[L];
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) lines[l] = load<B>(sums + (c + l) * NR + part);
        PackPanels<float, B>::template transpose_lanes<L / 2>(lines);
        const int64_t left = std::min<int64_t>(L, g.of.channels - channel - c);
        for (int64_t l = 0; l < std::min<int64_t>(L, g.o - panel * NR - part); ++l) {
          float* const to = g.dw + ((panel * NR + part + l) * g.taps.count() + tap) * g.of.channels + channel + c;
          V line = lines[l];
          if (!g.fresh) line += SplitPanel<float, B>::some(to, left);
          left == L ? store<B>(to, line) : void(std::memcpy(to, &line, left * sizeof(float)));
        }
      }
    }
  }
};

void sum_images(const PaddedImages& of, const Taps& taps, int64_t o, const float* x, const float* dy, float* dw,
                ParallelFor parallel_for) {
  ConvGradient g{of, taps, o, x, dy};
  // Stretches of one size, as many at once as their pixels have room.
  const int64_t channels = g.channels() + whole(o, kRowsByAmx);
  const int64_t most = std::max<int64_t>(kTurned / (kPieces * channels) / kAmxTerms, 4);  // blocks at once
  const int64_t all = ceil_div(of.outputs(), kAmxTerms), cuts = ceil_div(all, most);
  g.blocks = ceil_div(all, cuts), g.dw = dw;
  g.line = (ceil_div(g.blocks * kAmxTerms + taps.furthest(), kAmxTerms) | 1) * kAmxTerms;
  std::vector<Stretch> stretches;
  for (int64_t image = 0; image < of.n; ++image) {
    for (int64_t first = 0; first < of.outputs(); first += g.blocks * kAmxTerms) {
      stretches.push_back({image, first, std::min(g.blocks * kAmxTerms, of.outputs() - first)});
    }
  }
  const int64_t together = std::max<int64_t>(most / g.blocks, 1), count = stretches.size();
  const Scratch<BFloat16> turned(std::min(together, count) * g.of_stretch());
  const int64_t panels = ceil_div(o, kRowsByAmx);
  const Scratch<float> of_dy(panels * std::min(together, count) * g.of_panel());
  g.turned = turned.get(), g.panels = of_dy.get();
  for (int64_t first = 0; first < count; first += together) {
    g.stretches = stretches.data() + first, g.count = std::min(together, count - first), g.fresh = !first;
    const int64_t parts = g.count * g.line / kAmxTerms;
    parallel(parallel_for, parts, 4, [&](int64_t begin, int64_t end) { dispatch<TurnPixels, float>(g, begin, end); });
    parallel(parallel_for, panels * g.count, 1,
             [&](int64_t begin, int64_t end) { dispatch<PanelsOfDy, float>(g, begin, end); });
    parallel_items(parallel_for, panels * g.channels() / kRowsByAmx * taps.count(), 1,
                   [&](const Items& items) { dispatch<RunConvGradient, float>(g, items); });
  }
}

Taps taps_of(const Conv& c, int64_t wide) { return {c.kh, c.kw, c.dilation[0] * wide, c.dilation[1]}; }

// x as y reads it, and dy as dx does.
PaddedImages forward_of(const Conv& c) {
  return {c.n, c.h, c.w, c.i, c.padding[0], c.padding[1], c.oh, c.ow, c.ow + (c.kw - 1) * c.dilation[1]};
}
PaddedImages backward_of(const Conv& c) {
  const int64_t top = (c.kh - 1) * c.dilation[0] - c.padding[0], left = (c.kw - 1) * c.dilation[1] - c.padding[1];
  return {c.n, c.oh, c.ow, c.o, top, left, c.h, c.w, c.w + (c.kw - 1) * c.dilation[1]};
}

}  // namespace

bool convolves_in_pieces(const Conv& c, bool backward) {
  if (!by_amx(true) || c.groups != 1 || c.kh * c.kw == 1 || c.stride[0] != 1 || c.stride[1] != 1) return false;
  const PaddedImages of = forward_of(c), back = backward_of(c);
  if (c.n * c.oh * c.ow < kPixels || !c.i || !c.o || back.top < 0 || back.left < 0) return false;
  const auto reaches_far = [&](const PaddedImages& image) {
    return taps_of(c, image.wide).furthest() * pixel_of(image) > kBand;
  };
  if (reaches_far(of) || (backward && reaches_far(back))) return false;
  const auto padded = [](int64_t size, int64_t of) { return double(whole(size, of)) / double(size); };
  const auto computed = [&](const PaddedImages& image, int64_t terms, int64_t columns) {
    const double outputs = double(whole(image.outputs(), kAmxRows)) / double(image.oh * image.ow);
    return padded(terms, kAmxTerms) * padded(columns, kAmxRows) * outputs;
  };
  return computed(of, c.i, c.o) <= kMostPadding && (!backward || computed(back, c.o, c.i) <= kMostPadding);
}

int64_t conv_panels_numel(int64_t o, int64_t i, int64_t taps) {
  const Panels panels(i, o);
  return panels.count() * taps * panels.of_tap();
}

void pack_conv_panels(int64_t o, int64_t i, int64_t taps, const float* w, float* to, ParallelFor parallel_for) {
  make_panels(w, o, i, taps, true, Panels(i, o), to, parallel_for);
}

void dense_conv(const DenseConv& op, ParallelFor parallel_for) {
  const Conv& c = op.conv;
  const PaddedImages of = forward_of(c);
  const Panels panels(c.i, c.o);
  const Scratch<float> made(op.panels ? 0 : conv_panels_numel(c.o, c.i, c.kh * c.kw));
  if (!op.panels) pack_conv_panels(c.o, c.i, c.kh * c.kw, op.w, made.get(), parallel_for);
  multiply_images(of, taps_of(c, of.wide), panels, op.x, op.panels ? op.panels : made.get(), op.bias, op.y, op.threads,
                  parallel_for);
}

void dense_conv_backward(const DenseConvBackward& op, ParallelFor parallel_for) {
  const Conv& c = op.conv;
  if (op.dx) {
    const PaddedImages of = backward_of(c);
    const Panels panels(c.o, c.i);
    const Scratch<float> made(panels.count() * c.kh * c.kw * panels.of_tap());
    make_panels(op.w, c.o, c.i, c.kh * c.kw, false, panels, made.get(), parallel_for);
    multiply_images(of, taps_of(c, of.wide), panels, op.dy, made.get(), nullptr, op.dx, op.threads, parallel_for);
  }
  if (op.dw) {
    const PaddedImages of = forward_of(c);
    sum_images(of, taps_of(c, of.wide), c.o, op.x, op.dy, op.dw, parallel_for);
  }
}

}  // namespace fastfact
