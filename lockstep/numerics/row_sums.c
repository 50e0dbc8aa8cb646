/* Sums of the rows (512 words) and of the columns of a buffer's 64-bit words, modulo 2^64, and a copy that takes them.
 *
 * Bytes that are not there count as zero, so pieces may come in any order, of any length, from any 8-byte place: each
 * adds what it has to sums that began at zero.
 */
#include <stdint.h>
#include <string.h>

enum { ROW = 512, LANES = 8, AHEAD = 8192 };

typedef uint64_t lanes __attribute__((vector_size(64), aligned(1)));

/* Whole groups of eight words within one row. With a target, they are copied there on the way. */
static inline __attribute__((always_inline)) uint64_t take(const uint64_t *from, uint64_t *to, uint64_t *columns,
                                                           long groups) {
    lanes sum = {0};
    for (long i = 0; i < groups; i++) {
        if (!to) __builtin_prefetch((const char *)from + i * sizeof(lanes) + AHEAD); /* a copy has enough in flight */
        lanes words = ((const lanes *)from)[i];
        sum += words;
        ((lanes *)columns)[i] += words;
        if (to) ((lanes *)to)[i] = words;
    }
    uint64_t total = 0;
    for (int i = 0; i < LANES; i++) total += sum[i];
    return total;
}

/* Add the sums of num_bytes bytes that lie (or, with a target, shall lie) at `place`, counted in words from the
 * beginning of the buffer. rows: of the whole buffer; columns [512]; target: where to copy to, or null. */
void row_sums(const uint8_t *from, uint8_t *target, long num_bytes, long place, uint64_t *rows, uint64_t *columns) {
    while (num_bytes > 0) {
        long column = place % ROW, words = num_bytes / 8, left = ROW - column;
        if (words > left) words = left;
        uint64_t *sums = columns + column;
        uint64_t total = 0;
        long groups = words / LANES, done = groups * LANES;
        if (target)
            total += take((const uint64_t *)from, (uint64_t *)target, sums, groups);
        else
            total += take((const uint64_t *)from, 0, sums, groups);
        long rest = words < left ? num_bytes - done * 8 : (words - done) * 8; /* the last words, and part of one */
        for (long at = done * 8; rest > 0; at += 8, rest -= 8) {
            uint64_t word = 0;
            memcpy(&word, from + at, rest < 8 ? rest : 8);
            if (target) memcpy(target + at, from + at, rest < 8 ? rest : 8);
            sums[at / 8] += word;
            total += word;
        }
        rows[place / ROW] += total;
        if (words < left) return;
        from += words * 8;
        if (target) target += words * 8;
        place += words;
        num_bytes -= words * 8;
    }
}

static inline uint64_t mix(uint64_t word) { /* the finaliser of splitmix64, as in row_sums.py */
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

/* The sum of sums[i], each mixed with its place. */
uint64_t mixed(const uint64_t *sums, long count, uint64_t added, uint64_t flipped) {
    uint64_t total = 0;
    for (long i = 0; i < count; i++) total += mix(sums[i] ^ mix(((i + 1) * 0x9E3779B97F4A7C15ull + added) ^ flipped));
    return total;
}
