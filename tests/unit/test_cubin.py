"""Reading cubins of CUDA 12 and CUDA 13, and the assembler's log."""

from __future__ import annotations

import base64
import zlib

import pytest

from labkit.errors import InputError
from labkit.kernels import nvrtc
from labkit.kernels.cubin import KernelCode, LogEntry, cubin_arch, read_cubin, read_log
from labkit.kernels.source import KernelSource

TINY = """
extern "C" __global__ void __launch_bounds__(96) tiny(float* x) {
    __shared__ float cells[100];
    cells[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = cells[threadIdx.x ^ 1];
}
"""
# TINY by nvcc of CUDA 13.0 (-cubin -arch=sm_86, sm_90), zlib and base85; ptxas said 10 registers, 400 bytes.
CUDA_13 = {
    86: (
        "c-rk&&1(}u6n~rDBx@VHZ9UlFM^~{>q20C`V+6tU!;gYr^bovAx=q$5G|7hDO-NKQRS{28#J@lgdiLf;dK6Dyyo-1c@lfw-oUbI?"
        "*-eWGD&m9LH}5y^y?Hb9=Iz`$d+}UA5T<3I6o8i?K!=hM${S2UN<k<I36LNO3f9!@ob6bSzJz)$UN5?M+Rl}-HPA|?V`!zS=B(sP"
        "H_VQlsW7>!(T-!(9L>p>>TRqe**V=ZvK={NmTX5aIg<>sjDjDWHI^#N=^K__G^h>_=vxu&LN64SExnv0QrR*c)2Wx~81|rNoV;23"
        "qwDXo*x$N-;(r@Dikb*P4}OZ^ArHPl@ZBDKh2VW2{4v2J9{d@>B@h0V;JZBd7lQYA7l2ZHu)h;egI$g$q9f4hV?y)Y#$1W4HX5TK"
        "H&+{@GU-yCSeHF&`IK<D(j@v&2h!JO^9<9$D_leEO&H*EYJP5hTAekmGP<wrFaZrg9JNIZl%1Mx!)zt1s~NLc&KGoiUaDi71$#_I"
        "Cur!lp-vswCdbqiW?CWvGnITHt7ec<nm`u*PEdQp(vHVt$6_a^V(Cd3ud3>}Ze?<+T}&t9>UdF&$5a|8E)^d|KF$=}#mk$J$?oHw"
        "mImbZNl1gP{z-}G3MWv%M<&^`D99j2Wsvr|&U*6@i2IrlxF~>_M!NeY*ueI|2-yRHwbmJ7{+;n}jDKa^?sy#-fna>DT@S%0TmI9("
        "LV=qCO-2Q^4+=!<VLEUKwZnZ7s0C;h!Q<~0cySX+=U4*2QedPS2*Wj;Cy&DLdKgyg5Fq-|gAsVz2ho}o#yQjsQT@T1M6P-BG}1@@"
        "9@;=Bynrvw6*zFqRd_xtaK9d;MGRl6(LQ*9{Nwu|Mf)T0ei$ybt8YVuPYRqz@+PT9_e9uGV8~sa|3dj!Ng#FGOG&o^r|+iTZuU$u"
        "xP$#3RwH=2z`#wej<nucL$3dn;A5X)L6u?q`H!-?&xf(j?AJMc$>%>D_HlicDXL5kcCnxL4-?8vvGtD>yVzf6>PZfN!W6H%?05Uv"
        "zomhD=KsLO&(ANr{`<W?_A*;=KaX?#IXhQA{vpm@WOKLdTKFxt@iUzLD6`MGPQ`Ei3(Vg0k_vBqTZlByo`%o63dc0dze!l2Ydg#z"
        "V!4rw_}|ZW9G6{r9CWRdr)%O??zRiL;_F7OxcT{hHqIYocyCb"
    ),
    90: (
        "c-rk&&1>976n`U)cGdM}cjFwoPCu-a796mZO=27;1nR^|iy>}H3#KFlMe)knCA-oh$;)n1nzb8@Pa(baSb8e-+(RjpKrf}I(o=dX"
        "K9#ly{{d;$8O>;=)rXxF8VbpS(VO??{pP)SGn#pKE?#;|K<Jzdj0E@&5QOxw#Q0|g#_?syEx<fTumA_CrRp>s*LL;mq!;jhJHj=m"
        "Vb*(~nwD#*W><A@HqA9Flvmfe+*OC2Rjb|6T~J-4=c;bg><@=S$!X}eQBTOW;TU$8bZS8Qt>_d))T46UxW0ZvTeJ1H!EECSeN;mO"
        "(_5_@w%%#@QpdJj%k6jgm}NSyZn`x#{bSMpCVN5JK4=?l)mmF~47Zk%R!uXz+R%Ra;<Co<wVI~4n!1y*(x<l>!$m#8jvOUTB&Rw~"
        "r+s}cp}*?u4<z(mUtdb-w@5n@kum3Alcs!LP7ewtRRu)n#|ixzUtdV*SBQSR5{Xk_?22z+N!WXYUXS!C5q}?1UM_A722&t=8-pp?"
        "?=qX|tfX>Z_$>X<n2Q`mdZgVa?Wa7zJ1a{Umd+`QmfZ;;{?f@1%#n7DDmreD9IeImx~|ak-E8S@(=rv;vRclxLe7VwJBD)nq*|L+"
        "Rwz^F=i&T%vsG7C2}tu*HvJxBc*9mt&dr{fJ#~CmtHDfHQD$^|wV^m|?Q~6<X)ANH3X7B8jlYTUI4{E{UDh$#&pK`Rpgi0GJRbIi"
        "7f2Hj2$BS19wC9uCFBs`F*!UBr!brE#bTJh-6J5rNA~F@4}?nyL=7SQGKO7hCl&p?Al}3Y8E`>{G19LHq(6s2j_f1le{=p9=Z^@#"
        "5ZS5%Jbl`{jXd8m4R)st6Mg;<(w{{wk#WI;yF9qpO7P7s@-J?3nb^P46C~`%e=iR|PQpf?q?Y0*UM<2GCHOv=Z=2yadpP|0sK1^h"
        "(Y1RN^g|iOd)S}PJ4@yx<Dc40e)GY-GW<LV+kJLPV3|a`^Dew{JMy#sS%$m)ynoVxj!%_fi^N0Eac-hggq=xP9$rHO5q>Yj+x<uW"
        "K6u_IB0MNVHF`}w1M+ivPX7h@cVdcuf%C&?@27Sw1OG8MH21+D3ZK6b+T}_Gh4*go#!#wq{%!j64;6lQHTEeLj`H_29!8Jjzl_=A"
        "l)5L+@-;HG!mm?>%My=0j$dM|lgK~E2Q`M6;s1SBGbQl#7(Oe0o}bP_Oux<XA4dEiNWuTXa+>h}Yi#}T_=A1?itFP3<E3QaKfeFJ"
        "?1QgH@Hhp3m7j@t<vPfX)@CAqN(U)*ES+;Pj^~c<M@r?i{B3c(n1SD~)XgKNJD-8C3VZv{aoxjGy1yzK<#HsBe~Xi%`OT<>10KcY"
        "_Q*>>LB8X0X5oVTRAc`B0eWJlmH"
    ),
}

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4tilePf' for 'sm_86'
ptxas info    : Function properties for _Z4tilePf
ptxas         .     2064 bytes stack frame, 2508 bytes spill stores, 2288 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 2064 bytes cumulative stack size, 400 bytes smem
ptxas info    : Compile time = 274.467 ms
ptxas info    : Compiling entry function 'other' for 'sm_86'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 360 bytes cmem[0]
"""


@pytest.fixture(autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path_factory.getbasetemp() / "kernel-cache"))


@pytest.mark.parametrize("arch", [86, 90])
def test_cubin_of_cuda_13(arch: int) -> None:
    cubin = zlib.decompress(base64.b85decode(CUDA_13[arch]))
    assert cubin[8] == 8 and cubin_arch(cubin) == arch
    (code,) = read_cubin(cubin).values()
    assert isinstance(code, KernelCode)
    assert (code.symbol, code.registers, code.stack, code.static_shared) == ("tiny", 10, 0, 400)
    assert code.max_threads == 96 and code.code_bytes > 0 and code.code_bytes % 128 == 0


@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_cubin_and_log_say_the_same(arch: str) -> None:
    compiled = nvrtc.compile_cubin(KernelSource.from_text(TINY), arch)
    assert cubin_arch(compiled.cubin) == nvrtc.arch_number(arch)
    code, log = read_cubin(compiled.cubin)["tiny"], read_log(compiled.log)["tiny"]
    assert (code.registers, code.stack, code.static_shared) == (log.registers, log.stack, log.static_shared)
    assert code.static_shared == 400 and code.max_threads == 96


def test_log_of_two_kernels() -> None:
    assert read_log(LOG) == {
        "_Z4tilePf": LogEntry(64, 2064, 2508, 2288, 400),
        "other": LogEntry(12, 0, 0, 0, 0),
    }
    assert read_log("nothing of use") == {}


@pytest.mark.parametrize("damage", ["empty", "text", "short", "32-bit"])
def test_what_is_no_cubin_is_refused(damage: str) -> None:
    whole = zlib.decompress(base64.b85decode(CUDA_13[86]))
    content = {
        "empty": b"",
        "text": b"// PTX text",
        "short": whole[: len(whole) // 2],
        "32-bit": whole[:4] + b"\x01" + whole[5:],
    }[damage]
    with pytest.raises(InputError, match="cubin"):
        read_cubin(content)
