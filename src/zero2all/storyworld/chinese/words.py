"""The words of the Chinese stories."""

from __future__ import annotations

from collections.abc import Iterable

from zero2all.storyworld.grammar import Word

GIRLS = "小雨 朵朵 小梅"
BOYS = "小明 小刚 冬冬"
# Animals go by their kind; the measure word is for their first appearance.
ANIMALS = "小兔 只 | 小猴 只 | 小熊 只 | 小鸭 只"
ELDERS = "王奶奶 她 | 李爷爷 他 | 张叔叔 他"
ANIMAL_ELDERS = "羊爷爷 牛大叔"
# Noun, measure word and marks, then the noun with what may stand before it.
# Marks: * can break, ! makes a sound, + can be made by hand, ^ is useful, $ is sold, ~ keeps off the rain.
THINGS = """
风筝 只 *+$: 红风筝 蓝风筝 花风筝 燕子风筝 蝴蝶风筝
皮球 个 $: 红皮球 蓝皮球 花皮球 小皮球
鼓 面 *!$: 红鼓 小鼓 花鼓 旧鼓
围巾 条 +^$: 红围巾 蓝围巾 格子围巾 毛线围巾
灯笼 盏 *+^$: 红灯笼 小灯笼 纸灯笼 兔子灯笼 鲤鱼灯笼
地图 张 ^: 旧地图 大地图 小地图 手绘地图
钥匙 把: 铜钥匙 银钥匙 小钥匙 旧钥匙
故事书 本 ^$: 新故事书 旧故事书 厚故事书 彩色故事书
铃铛 个 !$: 铜铃铛 银铃铛 小铃铛 旧铃铛
笛子 支 *!+$: 竹笛子 木笛子 新笛子 短笛子
木船 只 *+$: 小木船 红木船 白木船
盒子 个 *+$: 木盒子 红盒子 铁盒子 花盒子
篮子 个 *+^$: 竹篮子 小篮子 花篮子 旧篮子
雨伞 把 *^$~: 红雨伞 蓝雨伞 花雨伞 黄雨伞 黑雨伞
帽子 顶 +^$: 红帽子 蓝帽子 花帽子 毛线帽子
布娃娃 个 +$: 小布娃娃 大布娃娃 旧布娃娃
哨子 个 !+$: 铜哨子 竹哨子 红哨子 小哨子
杯子 个 *$: 白杯子 蓝杯子 花杯子 瓷杯子
镜子 面 *$: 小镜子 圆镜子 铜镜子
毽子 个 *+$: 红毽子 花毽子 新毽子 鸡毛毽子
陀螺 个 *+$: 木陀螺 红陀螺 大陀螺
书包 个 ^$: 红书包 蓝书包 新书包
扇子 把 *+^$: 纸扇子 竹扇子 花扇子 大扇子
手套 副 +^$: 红手套 棉手套 毛线手套
铅笔 支 *^$: 红铅笔 蓝铅笔 花铅笔 新铅笔
跳绳 根 +^$: 红跳绳 花跳绳 新跳绳
弹珠 颗 $: 蓝弹珠 绿弹珠 花弹珠 玻璃弹珠
风车 个 *+$: 红风车 纸风车 彩色风车 小风车
手电筒 个 *^$: 小手电筒 红手电筒 旧手电筒
口琴 把 *!$: 新口琴 旧口琴 银口琴
水壶 个 ^$: 绿水壶 小水壶 铁水壶
"""
LOUD = {"鼓": "敲", "铃铛": "摇", "笛子": "吹", "哨子": "吹", "口琴": "吹"}
MARKS = {"*": "breakable", "!": "loud", "+": "handmade", "^": "useful", "$": "sold", "~": "umbrella"}
# Where one goes, where one is, where one lives.
PLACES = """
公园 公园里 公园旁边 | 湖边 湖边 湖边 | 河边 河边 河边 | 山坡 山坡上 山坡上 | 果园 果园里 果园旁边
竹林 竹林里 竹林旁边 | 草地 草地上 草地旁边 | 树林 树林里 树林边
"""
SHOPS = "集市 集市上 | 小卖部 小卖部里 | 玩具店 玩具店里 | 杂货铺 杂货铺里 | 供销社 供销社里"
FRUIT = "苹果 个 | 桃子 个 | 梨 个 | 橘子 个"
FOOD = "饺子 个 | 包子 个 | 月饼 个 | 饼干 块 | 糖 颗 | 栗子 颗 | 草莓 颗 | 玉米 根"
WILD = "石子 颗 | 鹅卵石 块 | 蘑菇 个 | 野花 朵 | 松果 个 | 树叶 片 | 羽毛 根 | 橡子 颗"
SEEDS = "南瓜 颗 个 | 黄豆 颗 把 | 西瓜 颗 个 | 玉米 颗 根 | 萝卜 颗 个 | 冬瓜 颗 个 | 葫芦 颗 个"
RIDDLES = """
千条线，万条线，落到水里看不见 雨 | 麻屋子，红帐子，里面住着白胖子 花生 | 有时像圆盘，有时像小船 月亮
身穿绿衣裳，肚里水汪汪 西瓜 | 耳朵长，尾巴短，只吃菜，不吃饭 兔子 | 红公鸡，绿尾巴，一头扎在地底下 萝卜
身子细又长，肚里空荡荡，做成笛子会歌唱 竹子 | 远看像朵花，近看是把伞，下雨它出门，天晴它回家 雨伞
"""
TRAITS = "善良 勇敢 聪明 细心 耐心 热心 诚实 懂事 勤快 活泼 大方 有礼貌"

PHRASES = {
    "weather": "晴朗 暖和 凉爽 宁静 美丽 清爽 明媚",
    "season": "春天 夏天 秋天",
    "weekday": "星期一 星期二 星期三 星期四 星期五 星期六 星期天",
    "sky": "蓝蓝的天上飘着白云 天上一朵云也没有 微风轻轻地吹着 小鸟在枝头唱歌 阳光洒在大地上 远处的山青青的 "
    "知了在树上叫个不停 空气里有泥土的香味",
    "house": "小木屋 红砖房 白房子 小瓦房 竹楼 石头房子 草房",
    "yard": "一棵大柳树 一口小井 一片菜地 一条小路 两棵桃树 一丛竹子 一块大石头 一架葡萄",
    "kin": "妈妈 爸爸 奶奶 爷爷 外婆 外公 姑姑 舅舅 姐姐 哥哥",
    "clothes": "布鞋 外套 雨靴 毛衣 新鞋 球鞋",
    "meal": "早饭 午饭",
    "doing": "唱歌 散步 玩耍 画画 看云 捉蝴蝶 数蚂蚁 捡树叶 跑步 跳舞 吹口哨 听鸟叫 堆石子 晒太阳 翻跟头 采野花 "
    "捉蜻蜓 看风景 编花环",
    "work": "浇花 扫地 喂鸡 劈柴 挑水 拔草 修篱笆 摘豆角 晒谷子 编竹筐 织毛衣 刷油漆",
    "path": "小路 石板路 弯弯的小路 山路 林间小道 长长的田埂",
    "spot": "草丛里 石头后面 大树下 树叶堆里 篱笆边 小路旁 木头下面 花丛里 墙角 水坑边 土堆后面 灌木丛里",
    "junk": "一只蜗牛 几片枯叶 一只破鞋 一块碎瓦 一群蚂蚁 一个空瓶子 一只大甲虫 一截麻绳 半截树枝",
    "seat": "石头 树桩 田埂 台阶 草堆 木头 长凳",
    "sad": "难过 着急 伤心",
    "glad": "高兴 开心 快活",
    "celebrate": "跳了起来 又蹦又跳 拍起手来 唱起歌来 合不拢嘴 转了三个圈 手舞足蹈 笑出了声",
    "sweet": "蜜 糖 西瓜 甜枣",
    "game": "踢毽子 跳皮筋 捉迷藏 下棋 丢沙包 滚铁环 猜谜语 跳房子 拍皮球 翻花绳 打陀螺",
    "sport": "踢毽子 跳绳 拍皮球 投沙包 滚铁环",
    "dinner": "面条 饺子 包子 蛋炒饭 红烧鱼 馒头 烤红薯 豆腐",
    "dream": "星星 大海 会飞的鱼 月亮上的兔子 彩虹桥 糖做的房子 会说话的树 一条小龙",
    "color": "红 黄 蓝 绿 紫 花",
    "bug": "蝴蝶 蜻蜓 蚂蚱 瓢虫 小鸟",
    "counters": "豆子 石子 小棍 花生 扣子 玉米粒",
    "sound": "沙沙的响声 呜呜的哭声 咕咕的叫声 窸窸窣窣的声音 扑通扑通的声音",
    "hurt": "膝盖 脚 手 胳膊 鼻子",
}
DIGITS = "零一二三四五六七八九"


def _entries(text: str) -> list[list[str]]:
    return [entry.split() for entry in text.replace("\n", "|").split("|") if entry.strip()]


def _person(name: str, pronoun: str, kid: str, intro: str, *tags: str) -> Word:
    forms = {"": name, "kid": kid, "intro": intro, "he": pronoun, "He": pronoun, "they": f"{pronoun}们"}
    genders = {"她": {"girl"}, "他": {"boy"}, "它": {"girl", "boy"}}  # an animal may be either
    return Word(name, forms, frozenset({*tags, *genders[pronoun]}))


def _people() -> Iterable[Word]:
    for name in GIRLS.split():
        yield _person(name, "她", "孩子", f"一个叫{name}的女孩", "child", "town")
    for name in BOYS.split():
        yield _person(name, "他", "孩子", f"一个叫{name}的男孩", "child", "town")
    for name, measure in _entries(ANIMALS):
        yield _person(name, "它", "小家伙", f"一{measure}{name}", "child", "forest")
    for name, pronoun in _entries(ELDERS):
        yield _person(name, pronoun, "老人", name, "elder", "town")
    for name in ANIMAL_ELDERS.split():
        yield _person(name, "它", "老人", name, "elder", "forest")


def _things() -> Iterable[Word]:
    for entry in THINGS.strip().splitlines():
        head, names = entry.split(":")
        noun, measure, *marks = head.split()
        tags = {tag for mark, tag in MARKS.items() if mark in "".join(marks)}
        for full in names.split():
            forms = {
                "": noun, "full": full, "m": measure, "one": f"一{measure}{full}", "that": f"那{measure}{noun}",
                "this": f"这{measure}{noun}",
            }  # fmt: skip
            if noun in LOUD:
                forms["play"] = LOUD[noun]
            yield Word(full, forms, frozenset({noun, *tags}))


def _places() -> Iterable[Word]:
    for go, at, live in _entries(PLACES):
        yield Word(go, {"": go, "at": at, "live": live}, frozenset({"outdoors"}))
    for go, at in _entries(SHOPS):
        yield Word(go, {"": go, "at": at}, frozenset({"shop"}))


def _items() -> Iterable[Word]:
    for text, *tags in ((FRUIT, "food", "fruit"), (FOOD, "food"), (WILD, "wild"), ("硬币 枚", "money")):
        for noun, measure in _entries(text):
            yield Word(noun, {"": noun, "m": measure}, frozenset(tags))


def _numbers() -> Iterable[Word]:
    """`math` is the form for sums; before a measure word, two has a form of its own."""
    for number in range(2, 21):
        tens, ones = divmod(number, 10)
        text = ("" if tens == 0 else "十" if tens == 1 else f"{DIGITS[tens]}十") + (DIGITS[ones] if ones else "")
        yield Word(str(number), {"": "两" if number == 2 else text, "math": text})


def chinese_words() -> dict[str, tuple[Word, ...]]:
    """All words by kind."""
    seeds = (Word(noun, {"": noun, "m": measure, "out": out}) for noun, measure, out in _entries(SEEDS))
    return {
        "person": tuple(_people()),
        "thing": tuple(_things()),
        "place": tuple(_places()),
        "item": tuple(_items()),
        "number": tuple(_numbers()),
        "trait": tuple(Word(trait, {"": trait}) for trait in TRAITS.split()),
        "seeds": tuple(seeds),
        "riddle": tuple(Word(text, {"": text, "answer": answer}) for text, answer in _entries(RIDDLES)),
        "they": tuple(Word(text, {"": text}) for text in ("他们", "她们", "它们")),
        "part": (Word("morning", {"": "早晨"}), Word("afternoon", {"": "下午"})),
        **{kind: tuple(Word(text, {"": text}) for text in text.split()) for kind, text in PHRASES.items()},
    }
