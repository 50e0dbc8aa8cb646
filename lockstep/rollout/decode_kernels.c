/* What decoding one new token per sequence does between its matrix products, on bfloat16 with float32 inside.
 *
 * Every intermediate result that torch's own operators would round to bfloat16 is rounded here too. Sizes of a row are
 * multiples of 16 (of 32 for a head that is rotated). NaN comes through: nothing here is compiled as if numbers were
 * finite.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SMALL = 1 << 15 }; /* elements that are done before a second thread has been woken */

static inline float exp_nonpositive(float x) { /* relative error below 2e-7 for x <= 0; below -87 it is 0 */
    x = x < -126.0f ? -126.0f : x; /* not to infinity below; NaN stays */
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (int32_t)(n < -126.0f ? -127.0f : n) + 127; /* -127 gives the bits of 0 */
    uint32_t bits = (uint32_t)power << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

/* Sixteen floats at once; the compiler splits them where registers are narrower. */
typedef float vector __attribute__((vector_size(64), aligned(4)));
typedef uint32_t bits_vector __attribute__((vector_size(64)));
typedef uint16_t half_vector __attribute__((vector_size(32), aligned(2)));

static inline vector load(const uint16_t *from) {
    return (vector)(__builtin_convertvector(*(const half_vector *)from, bits_vector) << 16);
}

static inline void store(uint16_t *to, vector values) { /* round to nearest, ties to even; NaN stays NaN */
    bits_vector bits = (bits_vector)values;
    bits_vector rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits_vector is_nan = (bits_vector)(values != values); /* all ones where true */
    *(half_vector *)to = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), half_vector);
}

static inline vector rounded(vector values) {
    uint16_t half[16];
    store(half, values);
    return load(half);
}

static inline float total_of(vector values) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += values[i];
    return total;
}

/* hidden [rows, size] += change (unless null); out = weight * hidden / sqrt(mean(hidden^2) + epsilon). */
void add_rms_norm(uint16_t *hidden, const uint16_t *change, const uint16_t *weight, uint16_t *out, long rows, long size,
                  float epsilon) {
#pragma omp parallel for schedule(static) if (rows * size > SMALL)
    for (long row = 0; row < rows; row++) {
        uint16_t *h = hidden + row * size, *o = out + row * size;
        vector squares = {0};
        for (long i = 0; i < size; i += 16) {
            vector value = load(h + i);
            if (change) {
                value = rounded(value + load(change + row * size + i));
                store(h + i, value);
            }
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(total_of(squares) / size + epsilon);
        for (long i = 0; i < size; i += 16) store(o + i, load(weight + i) * rounded(load(h + i) * scale));
    }
}

/* out [rows, size] = silu(gate) * up, of gate_up [rows, 2 * size]. */
void silu_mul(const uint16_t *gate_up, uint16_t *out, long rows, long size) {
#pragma omp parallel for schedule(static) if (rows * size > SMALL / 4)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < size; i += 16) {
            vector gate = load(gate_up + 2 * row * size + i), up = load(gate_up + (2 * row + 1) * size + i), gated;
            for (int j = 0; j < 16; j++) {
                float small = exp_nonpositive(-fabsf(gate[j])); /* sigmoid without overflow on either side */
                gated[j] = gate[j] * ((gate[j] < 0 ? small : 1.0f) / (1.0f + small));
            }
            store(out + row * size + i, rounded(gated) * up);
        }
}

/* Rotate queries and keys of qkv [rows, heads + 2 kv_heads, size] in place and put rotated keys and values into the
 * cache [rows, kv_heads, 2, capacity, size] at each row's position. cosines, sines [rows, size]: the first half of the
 * sines is negated, so that rotating is x * cos + roll(x, size / 2) * sin. */
void rotate_append(uint16_t *qkv, const uint16_t *cosines, const uint16_t *sines, uint16_t *cache,
                   const int64_t *positions, long rows, long capacity, int heads, int kv_heads, int size) {
    const int width = heads + 2 * kv_heads, half = size / 2;
#pragma omp parallel for schedule(static) if (rows * width * size > SMALL)
    for (long row = 0; row < rows; row++) {
        const uint16_t *cosine = cosines + row * size, *sine = sines + row * size;
        for (int head = 0; head < width; head++) {
            uint16_t *x = qkv + (row * width + head) * size;
            if (head < heads + kv_heads)
                for (int i = 0; i < half; i += 16) {
                    vector first = load(x + i), second = load(x + half + i);
                    vector low = rounded(first * load(cosine + i)) + rounded(second * load(sine + i));
                    vector high = rounded(second * load(cosine + half + i)) + rounded(first * load(sine + half + i));
                    store(x + i, low);
                    store(x + half + i, high);
                }
            if (head < heads) continue;
            int stream = head - heads, kind = stream >= kv_heads; /* keys, then values */
            long place = (row * kv_heads + stream - kind * kv_heads) * 2 + kind;
            uint16_t *to = cache + (place * capacity + positions[row]) * size;
            memcpy(to, x, size * sizeof(uint16_t));
        }
    }
}

/* --- attention --------------------------------------------------------------------------------------------------- */

/* Inlined with constant sizes by the calls below, so that sums and queries stay in registers. parts = size / 16. */
static inline __attribute__((always_inline)) void attend(const uint16_t *queries, const uint16_t *keys,
                                                         const uint16_t *values, long length, int group, int parts,
                                                         float scaling, float *scores, uint16_t *out) {
    const int size = parts * 16;
    vector query[group][parts], sum[group][parts];
    float top[group], total[group];
    for (int g = 0; g < group; g++) top[g] = -__builtin_inff(), total[g] = 0;
    for (int g = 0; g < group; g++)
        for (int i = 0; i < parts; i++) query[g][i] = load(queries + g * size + i * 16) * scaling, sum[g][i] = (vector){0};
    for (long t = 0; t < length; t++) {
        vector key[parts];
        for (int i = 0; i < parts; i++) key[i] = load(keys + t * size + i * 16);
        for (int g = 0; g < group; g++) {
            vector product = query[g][0] * key[0];
            for (int i = 1; i < parts; i++) product += query[g][i] * key[i];
            float score = total_of(product);
            scores[g * length + t] = score;
            top[g] = score > top[g] ? score : top[g];
        }
    }
    for (int g = 0; g < group; g++)
        for (long t = 0; t < length; t++) {
            float weight = exp_nonpositive(scores[g * length + t] - top[g]);
            scores[g * length + t] = weight;
            total[g] += weight;
        }
    for (long t = 0; t < length; t++)
        for (int i = 0; i < parts; i++) {
            vector value = load(values + t * size + i * 16);
            for (int g = 0; g < group; g++) sum[g][i] += scores[g * length + t] * value;
        }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < parts; i++) store(out + g * size + i * 16, sum[g][i] / total[g]);
}

/* Attention of one token per sequence, grouped queries.
 *
 * cache    [rows, kv_heads, 2, positions, size]: keys, then values
 * queries  [rows, heads, size], rows query_stride elements apart
 * lengths  [rows]: positions in use, the new token's included
 * out      [rows, heads, size]
 *
 * One task is one sequence and one key head: its heads / kv_heads queries read each key and each value once.
 * Returns 0, or 1 if there was no memory for the scores.
 */
int decode_attention(const uint16_t *cache, const uint16_t *queries, const int64_t *lengths, uint16_t *out, long rows,
                     long positions, int heads, int kv_heads, int size, long query_stride, float scaling) {
    const int group = heads / kv_heads;
    int failed = 0;
#pragma omp parallel
    {
        float *scores = malloc(sizeof(float) * group * positions);
        if (scores == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (long task = 0; task < rows * kv_heads; task++) {
            long row = task / kv_heads, head = task % kv_heads, length = lengths[row];
            if (scores == NULL) continue;
            const uint16_t *keys = cache + task * 2 * positions * size, *values = keys + positions * size;
            const uint16_t *query = queries + row * query_stride + head * group * size;
            uint16_t *target = out + (row * heads + head * group) * size;
            if (size == 64 && group == 3)
                attend(query, keys, values, length, 3, 4, scaling, scores, target);
            else if (size == 128 && group == 2)
                attend(query, keys, values, length, 2, 8, scaling, scores, target);
            else
                attend(query, keys, values, length, group, size / 16, scaling, scores, target);
        }
        free(scores);
    }
    return failed;
}
