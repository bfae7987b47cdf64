// Products of integers on tiles (AMX): a tile product adds 64 k to 16 rows x 16 outputs. A step takes two, of x's high and low
// parts; a group ends in fp32.

struct alignas(64) IntegerTiles {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 take sums (high, low; of an even and an odd group), 4 and 5 hold x, 6 the panel's step.
struct Products {
    explicit Products(int height) {
        IntegerTiles config;
        for (int tile = 0; tile < 8; ++tile) config.rows[tile] = uint8_t(tile < 6 ? height : 16);
        _tile_loadconfig(&config);
    }
    ~Products() { _tile_release(); }
};

struct First { constexpr operator bool() const { return false; } };
struct Second { constexpr operator bool() const { return true; } };

// c [H][16] = a tile of rows times a panel. `ahead`: bytes to fetch ahead, or 0.
template <int H> void panel_product(const QuantizedRows& rows, int64_t tile, Panel panel, float* c, int64_t ahead) {
    alignas(64) int32_t sums[2][2][H][kPanel];
    F acc[H];
    for (int r = 0; r < H; ++r) acc[r] = zero();
    const int64_t groups = groups_of(rows.steps);
    auto multiply = [&](int64_t g, auto second) {
        if constexpr (second) {
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_zero(0);
            _tile_zero(1);
        }
        for (int64_t s = g * kGroupSteps; s < lesser((g + 1) * kGroupSteps, rows.steps); ++s) {
            const int8_t* lines = panel.lines + s * kStepLines;
            const char* x = rows.step(tile, s);
            for (int64_t line = 0; ahead && line < kStepLines; line += 64) __builtin_prefetch(lines + ahead + line, 0, 2);
            _tile_loadd(4, x, 64);
            _tile_loadd(5, x + kRowsInTile * kStepK, 64);
            _tile_loadd(6, lines, 64);
            if constexpr (second) {
                _tile_dpbssd(2, 4, 6);
                _tile_dpbssd(3, 5, 6);
            } else {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 5, 6);
            }
        }
        if constexpr (second) {
            _tile_stored(2, sums[1][0], 64);
            _tile_stored(3, sums[1][1], 64);
        } else {
            _tile_stored(0, sums[0][0], 64);
            _tile_stored(1, sums[0][1], 64);
        }
    };
    auto add = [&](int64_t g) {
        const F scale = load(panel.scales + g * kPanel);
        const float* x = rows.scale(tile, g);
        for (int r = 0; r < H; ++r) {
            const __m512i high = _mm512_load_si512(sums[g % 2][0][r]), low = _mm512_load_si512(sums[g % 2][1][r]);
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
            acc[r] = fma({_mm512_cvtepi32_ps(sum)}, scale * broadcast(x[r]), acc[r]);
        }
    };
    multiply(0, First{});
    for (int64_t g = 0; g < groups; g += 2) {
        if (g + 1 < groups) multiply(g + 1, Second{});
        add(g);
        if (g + 2 < groups) multiply(g + 2, First{});
        if (g + 1 < groups) add(g + 1);
    }
    for (int r = 0; r < H; ++r) store(c + r * kPanel, acc[r]);
}
