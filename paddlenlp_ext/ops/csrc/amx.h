// Tile registers of AMX: permission from Linux, and configuration by each thread.
#pragma once

#include "api.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define PLX_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace plx {

// Requests the tile registers from Linux. Returns whether the process may use them.
inline bool request_amx() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
inline const bool HAS_AMX = request_amx();

// Operand of LDTILECFG: bytes per row and number of rows of each tile.
struct TileShapes {
    alignas(64) uint8_t palette = 1;
    uint8_t start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Completes earlier stores. GCC does not know which memory the tile instructions read, and could drop stores to it.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Configures the tiles of the calling thread, and releases them at the end. Other libraries configure tiles too, so
// each task of an op has a session.
class AmxSession {
  public:
    explicit AmxSession(const TileShapes& shapes) {
        if (!HAS_AMX) return;
        finish_stores();
        _tile_loadconfig(&shapes);
    }
    ~AmxSession() {
        if (HAS_AMX) _tile_release();
    }
    AmxSession(const AmxSession&) = delete;
    AmxSession& operator=(const AmxSession&) = delete;
};

}  // namespace plx
#endif
