// The largest output of each row, taken from a linear layer's sums as they come: nothing else of the outputs is kept.
// They are compared as they would have been rounded to `type`, and the first of equals is found, whatever the order of
// the tasks.
#pragma once

#include "../kernels.h"
#include "../threads.h"
#include "compile_time.h"
#include "simd.h"

namespace pagemill {
namespace {

struct Argmax {
    int64_t* tokens;  // [rows]: the answer, or kNotFinite, kAllForbidden as in ChooseArgs
    DType type;
    int64_t rows = 0, parts = 0;
    // [parts][rows][2][W]: by lane the largest so far, infinite if one was no number; its vector's number
    float* found = nullptr;

    // A part is what one task at a time sees, in ascending order of outputs; so are the parts.
    void begin(int64_t rows_, int64_t parts_) {
        rows = rows_, parts = parts_;
        found = (float*)caller_scratch(2, sizeof(float) * parts * rows * 2 * W);
        for (int64_t i = 0; i < parts * rows; ++i) store(found + i * 2 * W, broadcast(-kInf));
    }

    // c [height][width] are outputs from `first` on, a multiple of W, of `n`, for the rows from `row` on.
    void take(const float* c, int width, int height, const float* bias, int64_t first, int64_t n, int64_t part,
              int64_t row) const {
        with_type(type, [&](auto* t) {
            using Y = Pointee<decltype(t)>;
            for (int r = 0; r < height; ++r) {
                float* best = found + (part * rows + row + r) * 2 * W;
                F most = load(best), where = load(best + W);
                for (int v = 0; v < width && first + v < n; v += W) {
                    F x = load(c + r * width + v);
                    if (bias) x = x + load(bias + v);
                    Y rounded[W];
                    store(rounded, x);
                    x = load(rounded);
                    x = select_less(x, broadcast(kInf), x, broadcast(kInf));
                    if (const int left = int(lesser<int64_t>(W, n - first - v)); left < W) {
                        float some[W];
                        store(some, broadcast(-kInf));
                        store_first(some, x, left);
                        x = load(some);
                    }
                    where = select_less(most, x, broadcast(float((first + v) / W)), where);
                    most = max(most, x);
                }
                store(best, most);
                store(best + W, where);
            }
        });
    }

    void end() const {
        for (int64_t row = 0; row < rows; ++row) {
            float most = -kInf;
            int64_t token = kAllForbidden;
            for (int64_t part = 0; part < parts; ++part) {
                const float* best = found + (part * rows + row) * 2 * W;
                for (int lane = 0; lane < W; ++lane) {
                    if (best[lane] < most || best[lane] == -kInf) continue;
                    const int64_t place = int64_t(best[W + lane]) * W + lane;
                    if (best[lane] > most || place < token) most = best[lane], token = place;
                }
            }
            tokens[row] = most == kInf ? kNotFinite : token;
        }
    }
};

// All tasks of a linear layer: each takes a group of its panels, for a block of its rows.
template <class Run> void run_panels(Run& run, int64_t rows, int64_t blocks) {
    const int64_t groups = (run.panels() + run.group - 1) / run.group;
    if (run.argmax) run.argmax->begin(rows, groups);
    parallel(groups * blocks, run);
    if (run.argmax) run.argmax->end();
}

}  // namespace
}  // namespace pagemill
