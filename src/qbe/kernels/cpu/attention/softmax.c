/* Scores to weights, and their entropy. Included by attention.c. */

/* The natural logarithm of x >= 1. */
INLINE float log_of(float x) {
    const uint32_t u = float_to_bits(x);
    const double m = bits_to_float((u & 0x7fffff) | 0x3f800000), s = (m - 1) / (m + 1), q = s * s;
    const double series = 1 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q / 13)))));
    return (float)(((int)(u >> 23) - 127) * 0.6931471805599453 + 2 * s * series);
}

/* Scores to weights, `count` of them, room for whole vectors. With the weight of a sink, a score without a value
   (-infinity: none), which goes to `at_sink`, they add up to 1; returns the entropy of all in nats. */
INLINE float softmax(float *scores, int64_t count, float softcap, float sink, float *at_sink) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t t = count; t < padded; t++) scores[t] = scores[0];
    Floats best = splat(-__builtin_inff()), total = {0}, weighted = {0};
    for (int64_t t = 0; t < padded; t += LANES) {
        Floats v;
        memcpy(&v, scores + t, sizeof v);
        if (softcap != 0) { /* tanh(x) = 1 - 2 / (e^2x + 1) */
            Floats twice = v * (2 / softcap);
            twice = pick(twice > splat(80.0f), splat(80.0f), twice);
            v = softcap * (1.0f - 2.0f / (exp_lanes(twice) + 1.0f));
            memcpy(scores + t, &v, sizeof v);
        }
        best = pick(v > best, v, best);
    }
    float top = best[0] > sink ? best[0] : sink;
    for (int i = 1; i < LANES; i++) top = best[i] > top ? best[i] : top;
    for (int64_t t = 0; t < padded; t += LANES) {
        Floats v;
        memcpy(&v, scores + t, sizeof v);
        const Floats below = v - top;
        v = exp_lanes(below);
        for (int i = 0; i < LANES && t + LANES > count; i++) v[i] = t + i < count ? v[i] : 0.0f;
        memcpy(scores + t, &v, sizeof v);
        total += v;
        weighted += v * below;
    }
    const float below = sink - top, own = sink > -__builtin_inff() ? exp_lanes(splat(below))[0] : 0.0f;
    const float sum = sum_lanes(total) + own, scale = 1.0f / sum;
    for (int64_t t = 0; t < count; t++) scores[t] *= scale;
    *at_sink = own * scale;
    return log_of(sum) - (sum_lanes(weighted) + (own > 0 ? own * below : 0.0f)) * scale;
}
