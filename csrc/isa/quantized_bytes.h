// Products of integers in bytes (VNNI): an instruction adds 4 k to 16 outputs of a row, weights without sign and x with. A group's
// sum is 256 * that of x's upper bytes + that of its lower bytes - kRaised * the sum of x. Nearly all upper bytes are 0: only
// where 4 neighbouring k have others are they multiplied.

constexpr int kRowsInTile = 4;
constexpr int kRaised = 128;
constexpr int64_t kStepsAtOnce = kGroupSteps;
constexpr int64_t kOwnOutputs8 = 24;  // cut_rows; each block expands the weights again

INLINE int64_t panels_together(int64_t, int64_t) { return kPanelsTogether; }

// Upper bytes follow each other in ascending k: threads read what others wrote, so the fewer lines the better.
struct alignas(64) TileGroup {
    int8_t low[kRowsInTile][kGroupK];
    int32_t correction[kRowsInTile];
    float scale[kRowsInTile];
    uint64_t has_high;  // a bit per 4 k: some row's upper bytes are not all 0
    int8_t high[kGroupK / 4][kRowsInTile][4];

    void put(const int32_t (*from)[kGroupK], int height, int length) {
        alignas(64) int8_t upper[kRowsInTile][kGroupK];
        uint64_t found = 0;
        for (int r = 0; r < height; ++r) {
            __m512i sum = _mm512_setzero_si512();
            for (int i = 0; i < length; i += 16) {
                const __m512i x = _mm512_load_si512(from[r] + i), above = _mm512_add_epi32(x, _mm512_set1_epi32(128));
                sum = _mm512_add_epi32(sum, x);
                _mm_store_si128((__m128i*)(low[r] + i), _mm512_cvtepi32_epi8(x));
                _mm_store_si128((__m128i*)(upper[r] + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(above, 8)));
            }
            correction[r] = -kRaised * _mm512_reduce_add_epi32(sum);
            for (int i = 0; i < length; i += kStepK) {
                const __m512i bytes = _mm512_load_si512(upper[r] + i);
                found |= uint64_t(_mm512_test_epi32_mask(bytes, bytes)) << i / 4;
            }
        }
        has_high = found;
        for (auto* to = high; found; found &= found - 1, ++to)
            for (int r = 0; r < height; ++r) std::memcpy((*to)[r], upper[r] + __builtin_ctzll(found) * 4, 4);
    }
};

// x: 4 k of a row, the next row's x_row bytes further.
template <int H, int P>
INLINE void add_quad(Dwords (&sum)[H][P], const int8_t* lines, int64_t stride, const int8_t* x, int x_row) {
    __m512i weight[P];
    for (int p = 0; p < P; ++p) weight[p] = _mm512_loadu_si512(lines + p * stride);
    for (int r = 0; r < H; ++r) {
        const __m512i four = _mm512_set1_epi32(load_as<int32_t>(x + r * x_row));
        for (int p = 0; p < P; ++p) sum[r][p] = (Dwords)_mm512_dpbusd_epi32((__m512i)sum[r][p], weight[p], four);
    }
}

// c [H][width] (+)= a tile of rows times a group of P panels.
template <int H, int P> void group_product(const TileGroup& x, const Piece& piece, int64_t panel, float* c, int64_t width, bool add) {
    const int8_t* lines = piece.lines + panel * piece.panel_bytes();
    Dwords sum[H][P];
    for (int r = 0; r < H; ++r)
        for (int p = 0; p < P; ++p) sum[r][p] = Dwords{};
    if (x.has_high) {
        const int8_t* high = x.high[0][0];
        for (uint64_t left = x.has_high; left; left &= left - 1, high += sizeof x.high[0])
            add_quad<H, P>(sum, lines + __builtin_ctzll(left) * 64, piece.panel_bytes(), high, 4);
        for (int r = 0; r < H; ++r)
            for (int p = 0; p < P; ++p) sum[r][p] <<= 8;
    }
    for (int r = 0; r < H; ++r)
        for (int p = 0; p < P; ++p) sum[r][p] += x.correction[r];
    const int64_t quads = piece.steps * kStepK / 4;
    for (int64_t quad = 0; quad < quads; ++quad) {
        if (piece.ahead)
            for (int p = 0; p < P; ++p) __builtin_prefetch(lines + p * piece.panel_bytes() + quad * 64 + piece.ahead, 0, 3);
        add_quad<H, P>(sum, lines + quad * 64, piece.panel_bytes(), x.low[0] + quad * 4, kGroupK);
    }
    for (int p = 0; p < P; ++p) {
        const F scale = load(piece.scales + (panel + p) * piece.scale_stride);
        for (int r = 0; r < H; ++r) {
            float* out = c + r * width + p * W;
            store(out, fma(to_float(sum[r][p]), scale * broadcast(x.scale[r]), add ? load(out) : zero()));
        }
    }
}

// The products of a tile of rows with a piece of `count` panels; c [height][count * kPanel] takes them, or adds them.
struct Products {
    explicit Products(int) {}

    void operator()(const TileGroup* x, int height, const Piece& piece, int64_t count, float* c, bool add) const {
        with_count(height, Upto<kRowsInTile>{}, [&](auto rows) {
            constexpr int H = decltype(rows)::value;
            if (count == kPanelsTogether) return group_product<H, kPanelsTogether>(*x, piece, 0, c, count * kPanel, add);
            for (int64_t i = 0; i < count; ++i) group_product<H, 1>(*x, piece, i, c + i * kPanel, count * kPanel, add);
        });
    }
};
