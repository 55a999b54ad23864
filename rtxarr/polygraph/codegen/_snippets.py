"""Functions that generated text can call: each is put before a kernel that needs it.

``#name`` in a text stands for the function ``name`` of this file. They are written for CUDA, HIP
and Metal at once, in terms of the macros that ``_dialects`` defines.
"""

from __future__ import annotations

import re

_INTEGERS = """
template<class T> struct Unsigned { typedef u32 type; };
template<> struct Unsigned<i64> { typedef u64 type; };
template<> struct Unsigned<u64> { typedef u64 type; };
"""

# Arithmetic of integers wraps around, which C says of unsigned ones alone.
SNIPPETS = {
    "Unsigned": _INTEGERS,
    "sum": """
template<class T> FUNCTION T sum(T a, T b) {
  typedef typename #Unsigned<T>::type U;
  return (T)((U)a + (U)b);
}
""",
    "difference": """
template<class T> FUNCTION T difference(T a, T b) {
  typedef typename #Unsigned<T>::type U;
  return (T)((U)a - (U)b);
}
""",
    "product": """
template<class T> FUNCTION T product(T a, T b) {
  typedef typename #Unsigned<T>::type U;
  return (T)((U)a * (U)b);
}
""",
    "negated": """
template<class T> FUNCTION T negated(T a) { return #difference((T)0, a); }
""",
    "absolute": """
template<class T> FUNCTION T absolute(T a) { return a < (T)0 ? #negated(a) : a; }
""",
    # Rounds down; by zero it is zero, as NumPy says.
    "floor_divide": """
template<class T> FUNCTION T floor_divide(T a, T b) {
  if (b == (T)0) return (T)0;
  if ((T)-1 < (T)0 && b == (T)-1) return #negated(a);  // the least number would overflow
  const T quotient = (T)(a / b);
  return (T)(quotient - ((a % b != 0) & ((a < (T)0) != (b < (T)0))));
}
""",
    "modulo": """
template<class T> FUNCTION T modulo(T a, T b) {
  if (b == (T)0 || ((T)-1 < (T)0 && b == (T)-1)) return (T)0;
  const T rest = (T)(a % b);
  return (T)(rest != 0 && (rest < (T)0) != (b < (T)0) ? rest + b : rest);
}
""",
    # A negative exponent gives the whole part of the result.
    "power": """
template<class T> FUNCTION T power(T base, T exponent) {
  if (exponent < (T)0) {
    const T sign = exponent & (T)1 ? base : (T)1;
    return base == (T)1 || base == (T)-1 ? sign : (T)0;
  }
  T out = (T)1;
  for (; exponent; exponent = (T)(exponent >> 1)) {
    if (exponent & (T)1) out = #product(out, base);
    base = #product(base, base);
  }
  return out;
}
""",
    "shift_left": """
template<class T> FUNCTION T shift_left(T a, T by) {
  typedef typename #Unsigned<T>::type U;
  return by < (T)0 || by >= (T)(8 * sizeof(T)) ? (T)0 : (T)((U)a << (U)by);
}
""",
    "shift_right": """
template<class T> FUNCTION T shift_right(T a, T by) {
  return by < (T)0 || by >= (T)(8 * sizeof(T)) ? (a < (T)0 ? (T)-1 : (T)0) : (T)(a >> by);
}
""",
    "sign_of": """
template<class T> FUNCTION T sign_of(T a) {
  return a != a ? a : (T)((a > (T)0) - (a < (T)0));
}
""",
    # NaN wins.
    "maximum": """
template<class T> FUNCTION T maximum(T a, T b) { return a >= b || a != a ? a : b; }
""",
    "minimum": """
template<class T> FUNCTION T minimum(T a, T b) { return a <= b || a != a ? a : b; }
""",
    "is_infinite": """
FUNCTION bool is_infinite(f32 a) { return a - a != 0 && a == a; }
""",
    "is_infinite_d": """
FUNCTION bool is_infinite_d(f64 a) { return a - a != 0 && a == a; }
""",
    "sign_bit": """
FUNCTION bool sign_bit(f32 a) { return BITS_OF_F32(a) >> 31; }
""",
    "sign_bit_d": """
FUNCTION bool sign_bit_d(f64 a) { return BITS_OF_F64(a) >> 63; }
""",
    # The quotient of numbers in [0, 1] and [1, 2], rounded right: what the operator does, but for
    # its test of other ranges. Where `a` is so small that digits are lost, `b` is 1.
    "near_one": """
FUNCTION f32 near_one(f32 a, f32 b) {
  const f32 rough = RECIPROCAL(b);
  const f32 inverse = $fmaf(rough, $fmaf(-b, rough, 1.0f), rough);
  const f32 quotient = a * inverse;
  return $fmaf($fmaf(-b, quotient, a), inverse, quotient);
}
""",
    # The quotients of a packet, rounded right: by the steps of CUDA's own division, which suffice
    # where nothing on the way is too small to be exact. A number stands for a packet of it.
    "element": """
FUNCTION f32 element(f32 a, int k) { return a; }
FUNCTION f32 element(PRIVATE const f32* a, int k) { return a[k]; }
""",
    "hard_quotients": """
template<int N> struct Several { f32 at[N]; };
template<int N> static __device__ __noinline__
Several<N> hard_quotients(Several<N> a, Several<N> b) {
  UNROLL
  for (int k = 0; k < N; ++k) {
    const f32 x = a.at[k], y = b.at[k];
    const bool is_zero = x == 0 && (y > 0 || y < 0);
    a.at[k] = is_zero ? (y > 0 ? x : -x) : x / y;
  }
  return a;
}
""",
    "quotients": """
template<int N, class A, class B> FUNCTION void quotients(PRIVATE f32* to, A a, B b) {
  bool easy = true;
  UNROLL
  for (int k = 0; k < N; ++k) {
    const f32 x = #element(a, k), y = #element(b, k), rough = RECIPROCAL(y);
    const f32 inverse = $fmaf(rough, $fmaf(-y, rough, 1.0f), rough), near = x * inverse;
    to[k] = $fmaf(inverse, $fmaf(-y, near, x), near);
    easy &= $fabsf(y) >= 5.9604645e-8f;  // 2**-24
    easy &= $fabsf(to[k]) >= 3.3087225e-24f;  // 2**-78
  }
  if (!easy) {
    Several<N> x, y;
    UNROLL
    for (int k = 0; k < N; ++k) { x.at[k] = #element(a, k); y.at[k] = #element(b, k); }
    x = #hard_quotients<N>(x, y);
    UNROLL
    for (int k = 0; k < N; ++k) to[k] = x.at[k];
  }
}
""",
    "sigmoid": """
FUNCTION f32 sigmoid(f32 a) {
  const f32 small = $expf(-$fabsf(a));
  return #near_one(a >= 0 ? 1.0f : small, 1.0f + small);
}
""",
    "sigmoid_d": """
FUNCTION f64 sigmoid_d(f64 a) {
  const f64 small = $exp(-$fabs(a));
  return (a >= 0 ? 1.0 : small) / (1.0 + small);
}
""",
    # The remainder has the sign of the divisor and is exact; NumPy's steps.
    "modulo_f": """
FUNCTION f32 modulo_f(f32 a, f32 b) {
  f32 rest = $fmodf(a, b);
  if (b == 0) return rest;
  if (rest == 0) return $copysignf(0.0f, b);
  return (b < 0) != (rest < 0) ? rest + b : rest;
}
""",
    "floor_divide_f": """
FUNCTION f32 floor_divide_f(f32 a, f32 b) {
  if (b == 0) return a / b;
  const f32 rest = $fmodf(a, b);
  f32 quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1.0f;
  if (quotient == 0) return $copysignf(0.0f, a / b);
  const f32 whole = $floorf(quotient);
  return quotient - whole > 0.5f ? whole + 1.0f : whole;
}
""",
    "log_add_exp": """
FUNCTION f32 log_add_exp(f32 a, f32 b) {
  if (a == b) return a + 0.693147180559945309f;
  const f32 apart = a - b;
  if (apart > 0) return a + $log1pf($expf(-apart));
  return apart <= 0 ? b + $log1pf($expf(apart)) : apart;
}
""",
}
for _name in ("modulo_f", "floor_divide_f", "log_add_exp"):
    _text = SNIPPETS[_name].replace("f32", "f64").replace(_name, f"{_name}_d")
    SNIPPETS[f"{_name}_d"] = re.sub(r"(\$\w+|\d\.\d+)f\b", r"\1", _text)
SNIPPETS |= {
    # Halves: bits in memory, float32 in registers.
    "round_f16": """
FUNCTION f32 round_f16(f32 a) { return half_value(half_bits(a)); }
""",
    "round_f16_d": """
FUNCTION f32 round_f16_d(f64 a) { return half_value(half_bits_d(a)); }
""",
    "round_bf16": """
FUNCTION f32 round_bf16(f32 a) { return bfloat_rounded(a); }
""",
    # Complex numbers; the quotient is Smith's, as NumPy's.
    "plus": """
template<class T> FUNCTION T plus(T a, T b) { return T{a.re + b.re, a.im + b.im}; }
""",
    "minus": """
template<class T> FUNCTION T minus(T a, T b) { return T{a.re - b.re, a.im - b.im}; }
""",
    "times": """
template<class T> FUNCTION T times(T a, T b) {
  return T{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
""",
    "over": """
template<class T> FUNCTION T over(T a, T b) {
  if (MAGNITUDE(b.re) >= MAGNITUDE(b.im)) {
    if (b.re == 0 && b.im == 0) return T{a.re / MAGNITUDE(b.re), a.im / MAGNITUDE(b.re)};
    const auto ratio = b.im / b.re;
    const auto scale = 1 / (b.re + b.im * ratio);
    return T{(a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale};
  }
  const auto ratio = b.re / b.im;
  const auto scale = 1 / (b.im + b.re * ratio);
  return T{(a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale};
}
""",
    "negated_c": """
template<class T> FUNCTION T negated_c(T a) { return T{-a.re, -a.im}; }
""",
    "conjugate": """
template<class T> FUNCTION T conjugate(T a) { return T{a.re, -a.im}; }
""",
    # Memory: packets are what one thread reads or writes in one go, up to 16 bytes each time.
    "value": """
template<class T> FUNCTION T value(T a) { return a; }
""",
    "value_f16": """
FUNCTION f32 value(f16 a) { return half_value(a.bits); }
""",
    "value_bf16": """
FUNCTION f32 value(bf16 a) { return bfloat_value(a.bits); }
""",
    "Store": """
template<class S> struct Store { template<class T> static FUNCTION_ S of(T a) { return a; } };
""",
    "Store_f16": """
template<> struct #Store<f16> {
  static FUNCTION_ f16 of(f32 a) { f16 out; out.bits = half_bits(a); return out; }
};
""",
    "Store_bf16": """
template<> struct #Store<bf16> {
  static FUNCTION_ bf16 of(f32 a) { bf16 out; out.bits = bfloat_bits(a); return out; }
};
""",
    "Packet": """
template<class S, int N> struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Packet {
  S at[N];
};
""",
    # `count` elements are left in the row.
    "load_packet": """
template<int N, class T, class S>
FUNCTION void load_packet(PRIVATE T* to, GLOBAL const S* from, Index count) {
  if (count >= N) {
    const #Packet<S, N> packet = *(GLOBAL const #Packet<S, N>*)from;
    UNROLL
    for (int k = 0; k < N; ++k) to[k] = #value(packet.at[k]);
  } else {
    UNROLL
    for (int k = 0; k < N; ++k) to[k] = k < count ? #value(from[k]) : T{};
  }
}
""",
    # The test is of the whole packet; without a branch, several loads are under way at once.
    "load_packet_if": """
template<int N, class T, class S>
FUNCTION void load_packet_if(bool test, PRIVATE T* to, GLOBAL const S* from) {
  #Packet<S, N> packet = {};
  if (test) packet = *(GLOBAL const #Packet<S, N>*)from;
  UNROLL
  for (int k = 0; k < N; ++k) to[k] = #value(packet.at[k]);
}
""",
    "store_packet": """
template<int N, class T, class S>
FUNCTION void store_packet(GLOBAL S* to, PRIVATE const T* from, Index count) {
  if (count >= N) {
    #Packet<S, N> packet;
    UNROLL
    for (int k = 0; k < N; ++k) packet.at[k] = #Store<S>::of(from[k]);
    *(GLOBAL #Packet<S, N>*)to = packet;
  } else {
    UNROLL
    for (int k = 0; k < N; ++k) {
      if (k < count) to[k] = #Store<S>::of(from[k]);
    }
  }
}
""",
    # What a thread keeps on chip is its own: no barrier is needed.
    "keep_packet": """
template<int N, class T, class S>
FUNCTION void keep_packet(SHARED S* to, PRIVATE const T* from) {
  #Packet<S, N> packet;
  UNROLL
  for (int k = 0; k < N; ++k) packet.at[k] = #Store<S>::of(from[k]);
  *(SHARED #Packet<S, N>*)to = packet;
}
""",
    "kept_packet": """
template<int N, class T, class S>
FUNCTION void kept_packet(PRIVATE T* to, SHARED const S* from) {
  const #Packet<S, N> packet = *(SHARED const #Packet<S, N>*)from;
  UNROLL
  for (int k = 0; k < N; ++k) to[k] = #value(packet.at[k]);
}
""",
    # Copies that are to be waited for: of a packet, and of those of its elements that are there.
    "ask_packet": """
template<int N, class S> FUNCTION void ask_packet(SHARED S* to, GLOBAL const S* from) {
  copy_bytes<N * sizeof(S)>(to, from);
}
""",
    "ask_each": """
template<int N, class S> FUNCTION void ask_each(SHARED S* to, GLOBAL const S* from, Index left) {
  UNROLL
  for (int k = 0; k < N; ++k) {
    if (k < left) copy_bytes<sizeof(S)>(to + k, from + k);
  }
}
""",
    # Division by a number that the host knows, of numerators below 2**31.
    "Divisor": """
struct Divisor { u32 number, factor, shift; };
FUNCTION Index quotient(Index a, Divisor d) {
  return (Index)((HIGH_PRODUCT((u32)a, d.factor) + (u32)a) >> d.shift);
}
FUNCTION Index rest(Index a, Divisor d) { return a - quotient(a, d) * (Index)d.number; }
""",
    "Divisor_wide": """
struct Divisor { Index number; };
FUNCTION Index quotient(Index a, Divisor d) { return a / d.number; }
FUNCTION Index rest(Index a, Divisor d) { return a % d.number; }
""",
    # Reductions: the value of a row, and of each way to combine two.
    "shuffled": """
template<class T> FUNCTION T shuffled(T a, int apart) { return SHUFFLE(a, apart); }
""",
    "shuffled_c64": """
FUNCTION c64 shuffled(c64 a, int apart) { return c64{SHUFFLE(a.re, apart), SHUFFLE(a.im, apart)}; }
""",
    "shuffled_c128": """
FUNCTION c128 shuffled(c128 a, int apart) {
  return c128{SHUFFLE(a.re, apart), SHUFFLE(a.im, apart)};
}
""",
    # What another lane has.
    "from_lane": """
template<class T> FUNCTION T from_lane(T a, int lane) { return SHUFFLE_FROM(a, lane); }
""",
    "from_lane_c64": """
FUNCTION c64 from_lane(c64 a, int lane) {
  return c64{SHUFFLE_FROM(a.re, lane), SHUFFLE_FROM(a.im, lane)};
}
""",
    "from_lane_c128": """
FUNCTION c128 from_lane(c128 a, int lane) {
  return c128{SHUFFLE_FROM(a.re, lane), SHUFFLE_FROM(a.im, lane)};
}
""",
    "Found": """
template<class T> struct Found { T number; Index at; };  // nothing while `at` is negative
template<class T> FUNCTION Found<T> shuffled(Found<T> a, int apart) {
  return Found<T>{SHUFFLE(a.number, apart), SHUFFLE(a.at, apart)};
}
""",
    # NaN wins, then the first of equals.
    "first_max": """
template<class T> FUNCTION #Found<T> first_max(#Found<T> a, #Found<T> b) {
  if (a.at < 0 || b.at < 0) return a.at < 0 ? b : a;
  if (a.number > b.number || (a.number != a.number && b.number == b.number)) return a;
  if (b.number > a.number || (b.number != b.number && a.number == a.number)) return b;
  return a.at < b.at ? a : b;
}
""",
    "first_min": """
template<class T> FUNCTION #Found<T> first_min(#Found<T> a, #Found<T> b) {
  if (a.at < 0 || b.at < 0) return a.at < 0 ? b : a;
  if (a.number < b.number || (a.number != a.number && b.number == b.number)) return a;
  if (b.number < a.number || (b.number != b.number && a.number == a.number)) return b;
  return a.at < b.at ? a : b;
}
""",
}
_NEEDS = re.compile(r"#(\w+)")


def needed(text: str) -> list[str]:
    """Return the names of the snippets that ``text`` calls, those they call themselves first."""
    order: dict[str, None] = {}

    def visit(body: str) -> None:
        for name in _NEEDS.findall(body):
            if name not in order:
                visit(SNIPPETS[name])
                order[name] = None

    visit(text)
    return list(order)


def plain(text: str) -> str:
    """Return ``text`` with the marks of snippets taken off."""
    return _NEEDS.sub(r"\1", text)
