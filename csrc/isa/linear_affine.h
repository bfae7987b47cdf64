// Products of few rows with weights held in integers (affine.h), which are widened in registers.

// c [MR][NP * NR] = a [k][MR] times NP panels of `blocks` each, for so few rows that nothing widened is used again.
template <int MR, int NP, int Bits>
void affine_product(const float* a, const AffineBlock<Bits>* from, int64_t blocks, float* c) {
    constexpr int NV = 2 * NP;
    F acc[MR][NV];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = zero();
    for (int64_t b = 0; b < blocks; ++b, ++from) {
        for (int p = 0; p < NP; ++p) fetch_after(from + p * blocks);
        for (int word = 0; word < Bits; ++word) {
            Integers all[NV];
            for (int v = 0; v < NV; ++v) all[v] = load_integers(from[v / 2 * blocks].words[v % 2][word]);
            for (int i = 0; i < AffineBlock<Bits>::kTogether; ++i, a += MR)
                for (int v = 0; v < NV; ++v) {
                    const AffineBlock<Bits>& block = from[v / 2 * blocks];
                    const F scale = load(block.scale + v % 2 * W), low = load(block.low + v % 2 * W);
                    const F w = fma(lowest_bits<Bits>(all[v] >> (i * Bits)), scale, low);
                    for (int r = 0; r < MR; ++r) acc[r][v] = fma(broadcast(a[r]), w, acc[r][v]);
                }
        }
    }
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) store(c + (r * NV + v) * W, acc[r][v]);
}

INLINE void few_rows_affine(const PackedLinear& weight, int64_t panel, int np, int rows, const float* a, float* c) {
    with_affine(weight.format, [&](auto* t) {
        using Block = Pointee<decltype(t)>;
        const int64_t blocks = weight.k / kAffineK;
        const Block* from = (const Block*)weight.panels + panel * blocks;
        if (np == 1) with_count(rows, Upto<kMaxTile>{}, [&](auto r) { affine_product<decltype(r)::value, 1>(a, from, blocks, c); });
        else with_count(rows, Upto<kMaxWideAffine>{}, [&](auto r) { affine_product<decltype(r)::value, 2>(a, from, blocks, c); });
    });
}
