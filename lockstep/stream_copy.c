/* A copy that writes past the caches: what is written once and read much later does not have to be fetched first. */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

enum { LINE = 64, PIECE = 1 << 20 };

static void stream(uint8_t *to, const uint8_t *from, long num_bytes) { /* both ends of a piece may lie anywhere */
    long head = (LINE - ((uintptr_t)to & (LINE - 1))) & (LINE - 1);
    if (head > num_bytes) head = num_bytes;
    memcpy(to, from, head);
    long at = head;
#if defined(__AVX512F__)
    for (; at + LINE <= num_bytes; at += LINE)
        _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512((const void *)(from + at)));
    _mm_sfence();
#elif defined(__AVX__)
    for (; at + LINE <= num_bytes; at += LINE)
        for (int half = 0; half < LINE; half += 32)
            _mm256_stream_si256((void *)(to + at + half), _mm256_loadu_si256((const void *)(from + at + half)));
    _mm_sfence();
#endif
    memcpy(to + at, from + at, num_bytes - at);
}

void stream_copy(uint8_t *to, const uint8_t *from, long num_bytes) {
#pragma omp parallel for schedule(static)
    for (long start = 0; start < num_bytes; start += PIECE)
        stream(to + start, from + start, num_bytes - start < PIECE ? num_bytes - start : PIECE);
}
