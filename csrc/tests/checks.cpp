// Runs every kernel of every instruction set that this CPU has, and a small decoder, on random shapes against plain
// loops in fp64, from several threads at once: what `make sanitize` runs under the sanitizers, and `make test-arm` in
// QEMU. Sanitizers do not see what tiles read, so every operand ends where its last page does, and the next page cannot
// be touched.
#include "checks.h"
#include "../kernels.h"
#include "../threads.h"

#include <cstdio>
#include <cstdlib>
#include <random>

using namespace pagemill;

int main(int count, char** arguments) {
    const int rounds = count > 1 ? int(std::strtol(arguments[1], nullptr, 10)) : 50;
    const uint32_t seed = count > 2 ? uint32_t(std::strtoul(arguments[2], nullptr, 10)) : std::random_device{}();
    std::fprintf(stderr, "seed %u\n", seed);
    random_source.seed(seed);
    check_threads();
    for (const std::string& name : available_isas()) {
        use_isa(name);
        for (int round = 0; round < rounds; ++round) {
            Exclusive exclusive;
            set_num_threads(1 + round % 3);
            check_linear();
            check_rows_alone();
            check_affine();
            check_mlp();
            check_attention();
            check_elementwise();
            check_prepare_heads();
            check_quantized();
            check_rounding();
            check_sampling();
            check_dequantize();
            check_stored();
            check_decoder();
        }
        std::printf("%s: %d rounds\n", name.c_str(), rounds);
    }
}
